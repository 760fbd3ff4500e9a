"""Kernels in Triton for NVIDIA GPUs, behind operators of torch.library; imported when first called."""
