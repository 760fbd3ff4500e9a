// Torch operators in C++ on torch's stable ABI, whose headers compile in a third of the time of torch/library.h.
//
// `kernels/__init__.py` defines an operator by a Python function's signature. A source here implements it by a function
// with the same parameters in the same order. Torch checks every call against the signature, and the number of
// parameters; tests/kernels/test_operators.py compares their types.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::contiguous;
using torch::stable::new_empty;
using torch::stable::Tensor;

// Returns a tensor's numbers. Raises RuntimeError unless they have type T and are contiguous on a CPU.
template <class T>
T* data(const Tensor& tensor) {
  constexpr ScalarType type = torch::headeronly::CppTypeToScalarType<std::remove_const_t<T>>::value;
  STD_TORCH_CHECK(tensor.scalar_type() == type, "a tensor's numbers do not have type ", toString(type));
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous(), "a tensor is not contiguous on a CPU");
  return static_cast<T*>(tensor.data_ptr());
}

}  // namespace
