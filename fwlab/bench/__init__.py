"""Measure speed and memory: `operations` on a CPU, `kernels` on a GPU.

docs/tools/peers.py of the repository compares with others.
"""
