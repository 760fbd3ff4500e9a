// All kernels on block products in one source, since torch's headers take longer to compile than the kernels do.

#include "attention.cpp"
#include "cross_entropy.cpp"
#include "experts.cpp"
#include "muon.cpp"

// Returns whether this PyTorch has block products on this processor; its build or its settings may lack them.
bool block_products() {
  try {
    Scratch scratch;
    bf16 *ones = scratch.take<bf16>(32 * 32), *packed = scratch.take<bf16>(32 * 32);
    float* c = scratch.take<float>(32 * 32);
    std::fill_n(ones, 32 * 32, bf16(1.0f));
    pack_rows<false>(ones, 32, 32, packed);
    at::native::cpublas::brgemm(32, 32, 32, 32, 32, 32, false, ones, packed, c);
    finish();
    return std::all_of(c, c + 32 * 32, [](float sum) { return sum == 32; });
  } catch (...) {
    return false;
  }
}

STABLE_TORCH_LIBRARY_IMPL(expert_threshold, CompositeExplicitAutograd, m) {
  m.impl("block_products", TORCH_BOX(&block_products));
}
