"""Benchmarks for those who work on fwlab, not in the package.

- `peers`: what you would use instead of fwlab.
- `lengths`: by sequence length and by batch, next to dense forms and
  softmax attention.
- `busy`: a training step, alone and while another program keeps a core busy,
  with each setting of threads, and what `fwlab train` chooses.
- `imports`: the time to import fwlab, next to PyTorch.
- `steps`: a training step of every mixer by sequence length.
- `training`: the loop of `fwlab train`, next to a bare loop.
- `generation`: tokens per second by context, next to nanoGPT with a cache.

`settings` has the ways that threads can wait, which some of them compare.
"""
