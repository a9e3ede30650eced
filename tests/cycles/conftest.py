"""The cycle model reads compiled kernels."""

from fwlab.ops.call import gpu

if gpu.INTERPRETED or not gpu.installed():
    collect_ignore_glob = ["test_*.py"]
