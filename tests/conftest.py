"""Shared by all tests."""

import torch

# Small problems: a second thread costs more than it brings, and test
# processes run beside each other.
torch.set_num_threads(1)
