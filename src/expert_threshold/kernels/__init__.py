"""Kernels in C++ (`cpu`) and Triton (`gpu`); no caller knows how they are called."""
