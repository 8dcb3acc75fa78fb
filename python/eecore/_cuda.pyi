"""CUDA kernels: importing it registers them; see csrc/cuda/module.cpp."""
