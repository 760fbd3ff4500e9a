// A routed sum of relu² experts, forward and backward, in bfloat16: y_t = Σ_e z[t,e] g[t,e] down_e · relu(up_e x_t)².
//
// Rows are pairs of a token and one of its experts, ordered by expert, then token. They are computed in blocks that
// stay in a core's cache: gathered, multiplied, squared and multiplied again, so that only the hidden activations that
// backward needs are written out. Weights are packed for the products on the fly. Sums over a token's experts and over
// an expert's tokens run in a fixed order, whatever the number of threads.
//
// A shared expert, or a feed-forward, processes every token without a gate: row r is token r.

#include <optional>

#include "common.h"

namespace experts {
namespace {

constexpr int64_t ROWS = 256;       // in a block, so that its rows and activations fit a cache of 2 MiB
constexpr int64_t TILE_ROWS = 256;  // in a tile of the weights' gradient, summed in float32
constexpr int64_t TILE_COLUMNS = 768;

struct Rows {  // a block of an expert; `padded` is where it starts if every block is rounded up to 32 rows
  int64_t expert, start, count, padded, rounded;
};

std::vector<Rows> blocks_of(const int64_t* first, int64_t experts) {
  std::vector<Rows> blocks;
  int64_t padded = 0;
  for (int64_t e = 0; e < experts; ++e)
    for (int64_t start = first[e]; start < first[e + 1]; start += ROWS) {
      const int64_t count = std::min(ROWS, first[e + 1] - start), rounded = round_up(count, 32);
      blocks.push_back({e, start, count, padded, rounded});
      padded += rounded;
    }
  return blocks;
}

// The number of rows in all blocks, each rounded up to whole tiles.
int64_t padded_rows(const std::vector<Rows>& blocks) {
  return blocks.empty() ? 0 : blocks.back().padded + blocks.back().rounded;
}

// Calls then(from, to) on each thread with neighbouring blocks, which share packed weights; row counts are balanced.
template <class Then>
void for_neighbours(const std::vector<Rows>& blocks, Then&& then) {
  const int64_t threads = at::get_num_threads(), rows = padded_rows(blocks);
  const auto begin = [&](int64_t thread) {
    return std::partition_point(blocks.begin(), blocks.end(),
                                [&](const Rows& b) { return (b.padded + b.rounded / 2) * threads < rows * thread; }) -
           blocks.begin();
  };
  at::parallel_for(0, threads, 1, [&](int64_t from, int64_t to) {
    for (int64_t thread = from; thread < to; ++thread)
      if (begin(thread) < begin(thread + 1)) then(begin(thread), begin(thread + 1));
  });
}

// Calls then(token, expert) for each assigned pair, in the order of tokens.
template <class Then>
void for_assigned(const uint8_t* assignment, int64_t tokens, int64_t experts, Then&& then) {
  const uint8_t *at = assignment, *end = assignment + tokens * experts;
  for (uint64_t eight; at < end; at += 8) {
    if (end - at >= 8 && (std::memcpy(&eight, at, 8), !eight)) continue;
    for (const uint8_t* one = at; one < std::min(at + 8, end); ++one)
      if (*one) then((one - assignment) / experts, (one - assignment) % experts);
  }
}

// Returns the block's rows of x (tokens, width): in place if contiguous whole tiles, else gathered and zero-padded.
const bf16* gather(const bf16* x, const int32_t* token, const Rows& b, int64_t width, bf16* out) {
  if (!token && b.count == b.rounded) return x + b.start * width;
  for (int64_t r = 0; r < b.count; ++r) {
    const int64_t t = token ? token[b.start + r] : b.start + r;
    std::memcpy(out + r * width, x + t * width, width * sizeof(bf16));
  }
  std::memset((void*)(out + b.count * width), 0, (b.rounded - b.count) * width * sizeof(bf16));
  return out;
}

// Writes c (rows, columns), times each row's scale, to `out`, whose rows are `width` apart.
template <class Scale>
void store_rows(const float* c, int64_t rows, int64_t columns, bf16* out, int64_t width, Scale&& scale) {
  for (int64_t r = 0; r < rows; ++r) {
    const __m512 factor = _mm512_set1_ps(scale(r));
    for (int64_t j = 0; j < columns; j += 32) {
      const __m512 low = _mm512_loadu_ps(c + r * columns + j), high = _mm512_loadu_ps(c + r * columns + j + 16);
      write(out + r * width + j, round(_mm512_mul_ps(low, factor), _mm512_mul_ps(high, factor)));
    }
  }
}

// y_t = the sum of the token's rows, added to y if `add`.
void combine(const bf16* rows, const int32_t* begin, const int32_t* slot, int64_t tokens, int64_t width, bool add,
             bf16* y) {
  at::parallel_for(0, tokens, 64, [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; ++t)
      for (int64_t c = 0; c < width; c += 16) {
        __m512 sum = add ? load(y + t * width + c) : _mm512_setzero_ps();
        for (int32_t i = begin[t]; i < begin[t + 1]; ++i) sum = _mm512_add_ps(sum, load(rows + slot[i] * width + c));
        store(y + t * width + c, sum);
      }
  });
}

// One tile of out (m, n) = Σ over an expert's blocks of a (m, rows) · b (rows, n).
struct Tile {
  int64_t begin, end;  // the blocks
  const bf16 *a, *b;   // (m, padded), (padded, n), packed
  int64_t m, n;
  bf16* out;
  int64_t row = 0, column = 0;
};

void tile(Tile whole, std::vector<Tile>& tiles) {
  for (whole.row = 0; whole.row < whole.m; whole.row += TILE_ROWS)
    for (whole.column = 0; whole.column < whole.n; whole.column += TILE_COLUMNS) tiles.push_back(whole);
}

void sum_over_rows(const Tile& t, const std::vector<Rows>& blocks, float* sum) {
  const int64_t m = std::min(TILE_ROWS, t.m - t.row), n = std::min(TILE_COLUMNS, t.n - t.column), columns = panel(t.n);
  if (t.begin == t.end) std::fill_n(sum, m * n, 0.0f);
  for (int64_t i = t.begin; i < t.end; ++i) {
    const Rows& b = blocks[i];
    accumulate(m, n, b.rounded, columns, t.a + b.padded * t.m + t.row * b.rounded,
               t.b + b.padded * t.n + t.column * b.rounded, sum, i > t.begin);
  }
  unpack(sum, m, n, columns, t.out + t.row * t.n + t.column, t.n);
}

// The pairs of an assignment (tokens, experts), by expert, then token.
struct Order {
  std::vector<int64_t> first;  // (experts + 1,) where each expert's rows start
  std::vector<int32_t> token;  // (pairs,)
  std::vector<int32_t> begin;  // (tokens + 1,) where each token's rows start in `slot`
  std::vector<int32_t> slot;   // (pairs,) the rows of each token

  Order(const uint8_t* assignment, int64_t tokens, int64_t experts) : first(experts + 1), begin(tokens + 1) {
    for_assigned(assignment, tokens, experts, [&](int64_t, int64_t e) { ++first[e + 1]; });
    for (int64_t e = 0; e < experts; ++e) first[e + 1] += first[e];
    token.resize(first[experts]);
    slot.resize(first[experts]);
    std::vector<int64_t> next(first);
    int32_t pairs = 0;
    for_assigned(assignment, tokens, experts, [&](int64_t t, int64_t e) {
      token[next[e]] = int32_t(t);
      slot[pairs++] = int32_t(next[e]++);
      begin[t + 1] = pairs;
    });
    for (int64_t t = 0; t < tokens; ++t) begin[t + 1] = std::max(begin[t], begin[t + 1]);
  }
};

// One term of the sum: routed experts, or a shared expert, whose gates, token, begin and slot are null.
struct Term {
  const bf16 *x, *up, *down;  // x: (tokens, width)
  int64_t tokens, experts, width, hidden;
  const int64_t* first = nullptr;
  const float* gates = nullptr;  // (tokens, experts)
  const int32_t *token = nullptr, *begin = nullptr, *slot = nullptr;
  bool add = false;  // to the results of earlier terms

  // kept: (pairs, hidden), receives relu of the pre-activations, or null; ys: (pairs, width), a buffer for the experts'
  // outputs, or y itself for a shared expert.
  void forward(bf16* kept, bf16* ys, bf16* y) const;

  struct Gradients {
    bf16* x;
    float* gates;  // zero outside the assignment
    bf16 *up, *down;
  };
  // The factors of the weights' gradients, by block, with `padded` rows in all.
  struct Factors {
    bf16 *transposed_dh, *packed_a;  // (hidden, padded), (padded, hidden)
    bf16 *packed_x, *transposed_dy;  // (padded, width), (width, padded)
  };
  // dxs: like ys.
  void backward(const bf16* dy, const bf16* kept, const Factors& to, bf16* dxs, const Gradients& d) const;
};

void Term::forward(bf16* kept, bf16* ys, bf16* y) const {
  const auto blocks = blocks_of(first, experts);
  for_neighbours(blocks, [&](int64_t from, int64_t to) {
    Scratch scratch;
    bf16* xs = scratch.take<bf16>(ROWS * width);
    bf16* as = scratch.take<bf16>(ROWS * hidden);
    bf16* packed_up = scratch.take<bf16>(width * hidden);
    bf16* packed_down = scratch.take<bf16>(width * hidden);
    int64_t expert = -1;
    for (int64_t i = from; i < to; ++i) {
      const Rows& b = blocks[i];
      if (expert != b.expert) {
        expert = b.expert;
        pack_transposed(up + expert * hidden * width, hidden, width, packed_up);
        pack_transposed(down + expert * hidden * width, width, hidden, packed_down);
      }
      const bf16* rows = gather(x, token, b, width, xs);
      multiply(b.rounded, hidden, width, rows, packed_up,
               [&](auto c, int64_t row, int64_t count, int64_t column, int64_t columns) {
                 count = std::min(count, b.count - row);
                 for (int64_t r = 0; r < count; ++r) {
                   bf16* keep = kept ? kept + (b.start + row + r) * hidden + column : nullptr;
                   bf16* a = as + (row + r) * hidden + column;
                   for (int64_t j = 0; j < columns; j += 32) {
                     const float* h = c + r * columns + j;
                     const __m512i relu = round(maximum(_mm512_loadu_ps(h)), maximum(_mm512_loadu_ps(h + 16)));
                     if (kept) stream(keep + j, relu);
                     const __m512 low = widen_low(relu), high = widen_high(relu);
                     write(a + j, round(_mm512_mul_ps(low, low), _mm512_mul_ps(high, high)));
                   }
                 }
               });
      multiply(b.rounded, width, hidden, as, packed_down,
               [&](auto c, int64_t row, int64_t count, int64_t column, int64_t columns) {
                 store_rows(
                     c, std::min(count, b.count - row), columns, ys + (b.start + row) * width + column, width,
                     [&](int64_t r) { return begin ? gates[token[b.start + row + r] * experts + b.expert] : 1.0f; });
               });
    }
    finish();
  });
  if (begin) combine(ys, begin, slot, tokens, width, add, y);
}

void Term::backward(const bf16* dy, const bf16* kept, const Factors& to, bf16* dxs, const Gradients& d) const {
  const auto [transposed_dh, packed_a, packed_x, transposed_dy] = to;
  const auto [dx, dgates, dup, ddown] = d;
  const auto blocks = blocks_of(first, experts);
  for_neighbours(blocks, [&](int64_t from, int64_t to) {
    Scratch scratch;
    bf16* xs = scratch.take<bf16>(ROWS * width);
    bf16* dys = scratch.take<bf16>(ROWS * width);
    bf16* as = scratch.take<bf16>(ROWS * hidden);
    bf16* dhs = scratch.take<bf16>(ROWS * hidden);
    float* gate = scratch.take<float>(ROWS);
    float* dgate = scratch.take<float>(ROWS);
    bf16* packed_up = scratch.take<bf16>(width * hidden);
    bf16* packed_down = scratch.take<bf16>(width * hidden);
    int64_t expert = -1;
    for (int64_t i = from; i < to; ++i) {
      const Rows& b = blocks[i];
      if (expert != b.expert) {
        expert = b.expert;
        pack_rows<false>(down + expert * hidden * width, width, hidden, packed_down);
        pack_rows<false>(up + expert * hidden * width, hidden, width, packed_up);
      }
      for (int64_t r = 0; r < b.count; ++r) gate[r] = begin ? gates[token[b.start + r] * experts + b.expert] : 1.0f;
      std::fill_n(dgate, b.count, 0.0f);
      const bf16* rows = gather(dy, token, b, width, dys);
      multiply(b.rounded, hidden, width, rows, packed_down,
               [&](auto c, int64_t row, int64_t count, int64_t column, int64_t columns) {
                 for (int64_t r = row; r < std::min(row + count, b.count); ++r) {
                   const bf16* keep = kept + (b.start + r) * hidden + column;
                   const __m512 scale = _mm512_set1_ps(2 * gate[r]);
                   __m512 sum = _mm512_setzero_ps();
                   for (int64_t j = 0; j < columns; j += 32) {
                     const float* da = c + (r - row) * columns + j;
                     const __m512i relu = read_all(keep + j);
                     _mm_prefetch(keep + j + columns, _MM_HINT_T0);
                     const __m512 low = widen_low(relu), high = widen_high(relu);
                     const __m512 slope_low = _mm512_mul_ps(_mm512_loadu_ps(da), low);
                     const __m512 slope_high = _mm512_mul_ps(_mm512_loadu_ps(da + 16), high);
                     sum = _mm512_fmadd_ps(slope_high, high, _mm512_fmadd_ps(slope_low, low, sum));
                     write(dhs + r * hidden + column + j,
                           round(_mm512_mul_ps(slope_low, scale), _mm512_mul_ps(slope_high, scale)));
                     write(as + r * hidden + column + j, round(_mm512_mul_ps(low, low), _mm512_mul_ps(high, high)));
                   }
                   dgate[r] += _mm512_reduce_add_ps(sum);
                 }
               });
      for (bf16* rest : {as, dhs})
        std::memset((void*)(rest + b.count * hidden), 0, (b.rounded - b.count) * hidden * sizeof(bf16));
      multiply(b.rounded, width, hidden, dhs, packed_up,
               [&](auto c, int64_t row, int64_t count, int64_t column, int64_t columns) {
                 store_rows(c, std::min(count, b.count - row), columns, dxs + (b.start + row) * width + column, width,
                            [](int64_t) { return 1.0f; });
               });
      transpose<true>(dhs, b.rounded, hidden, transposed_dh + b.padded * hidden);
      pack_rows<true>(as, b.rounded, hidden, packed_a + b.padded * hidden);
      if (begin)
        for (int64_t r = 0; r < b.count; ++r) {
          dgates[token[b.start + r] * experts + b.expert] = dgate[r];
          for (int64_t j = 0; j < width; j += 16)
            store(dys + r * width + j, _mm512_mul_ps(load(dys + r * width + j), _mm512_set1_ps(gate[r])));
        }
      transpose<true>(rows, b.rounded, width, transposed_dy + b.padded * width);
      pack_rows<true>(gather(x, token, b, width, xs), b.rounded, width, packed_x + b.padded * width);
    }
    finish();
  });
  if (begin) combine(dxs, begin, slot, tokens, width, add, dx);

  std::vector<Tile> tiles;
  for (int64_t e = 0, start = 0, end = 0; e < experts; ++e, start = end) {
    while (end < int64_t(blocks.size()) && blocks[end].expert == e) ++end;
    tile({start, end, transposed_dh, packed_x, hidden, width, dup + e * hidden * width}, tiles);
    tile({start, end, transposed_dy, packed_a, width, hidden, ddown + e * hidden * width}, tiles);
  }
  std::atomic<size_t> next = 0;  // dynamic scheduling, since tiles of experts with many rows take longer
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    float* sum = Scratch().take<float>(TILE_ROWS * TILE_COLUMNS);
    for (size_t i = next++; i < tiles.size(); i = next++) sum_over_rows(tiles[i], blocks, sum);
    finish();
  });
}

using MaybeTensor = std::optional<Tensor>;

// Calls then(index, term, pairs) for the shared expert, if there is one, then for the routed experts.
template <class Then>
void for_terms(const Tensor& given, const MaybeTensor& gates, const MaybeTensor& assignment,
               const std::vector<Tensor>& weights, Then&& then) {
  const Tensor x = contiguous(given);
  for (int64_t i = int64_t(weights.size()) / 2 - 1; i >= 0; --i) {
    const Tensor up = contiguous(weights[2 * i]), down = contiguous(weights[2 * i + 1]);
    Term term{.x = data<const bf16>(x), .up = data<const bf16>(up), .down = data<const bf16>(down),
              .tokens = x.size(0), .experts = up.size(0), .width = x.size(1), .hidden = up.size(1)};
    if (i > 0 || !assignment) {
      const int64_t first[] = {0, term.tokens};
      term.first = first;
      then(i, term, term.tokens);
      continue;
    }
    const Tensor assigned = contiguous(to(*assignment, ScalarType::Bool));
    const Tensor scale = contiguous(to(*gates, ScalarType::Float));
    const Order order((const uint8_t*)data<const bool>(assigned), term.tokens, term.experts);
    term.first = order.first.data();
    term.gates = data<const float>(scale);
    term.token = order.token.data();
    term.begin = order.begin.data();
    term.slot = order.slot.data();
    term.add = weights.size() > 2;
    then(i, term, order.first.back());
  }
}

constexpr int64_t EXACT = -1, NONE = 0;  // rows of pre-activations to allocate: as many as needed, or none

// Returns y and, for each term, relu of the pre-activations (rows, hidden), filled from the first row on; `room` is the
// number of rows for routed pairs.
std::vector<Tensor> forward(const Tensor& x, const MaybeTensor& gates, const MaybeTensor& assignment,
                            const std::vector<Tensor>& weights, int64_t room) {
  const Tensor y = new_empty(x, x.sizes());
  std::vector<Tensor> results(1 + weights.size() / 2, y);
  for_terms(x, gates, assignment, weights, [&](int64_t i, const Term& term, int64_t pairs) {
    const bool bounded = term.begin && room != EXACT;
    STD_TORCH_CHECK(!bounded || room == NONE || pairs <= room, pairs,
                    " token-expert pairs do not fit into ", room, " rows");
    const Tensor kept = new_empty(x, {room == NONE ? 0 : bounded ? room : pairs, term.hidden});
    const Tensor ys = term.begin ? new_empty(x, {pairs, term.width}) : y;
    term.forward(room == NONE ? nullptr : data<bf16>(kept), data<bf16>(ys), data<bf16>(y));
    results[1 + i] = kept;
  });
  return results;
}

// Returns the gradients of x, of gates if there are any, and of weights.
std::vector<Tensor> backward(const Tensor& upstream, const Tensor& x, const MaybeTensor& gates,
                             const MaybeTensor& assignment, const std::vector<Tensor>& weights,
                             const std::vector<Tensor>& kept) {
  const Tensor dy = contiguous(upstream), dx = new_empty(x, x.sizes());
  MaybeTensor dgates;
  if (gates) dgates = torch::stable::new_zeros(*gates, gates->sizes(), ScalarType::Float);
  std::vector<Tensor> dweights;
  for (const Tensor& weight : weights) dweights.push_back(new_empty(weight, weight.sizes()));
  for_terms(x, gates, assignment, weights, [&](int64_t i, const Term& term, int64_t pairs) {
    const int64_t padded = padded_rows(blocks_of(term.first, term.experts));
    const auto room = [&](int64_t columns) { return new_empty(x, {padded, columns}); };
    const Tensor dh = room(term.hidden), a = room(term.hidden), xs = room(term.width), dys = room(term.width);
    const Tensor dxs = term.begin ? new_empty(x, {pairs, term.width}) : dx;
    const Term::Factors factors{.transposed_dh = data<bf16>(dh), .packed_a = data<bf16>(a),
                                .packed_x = data<bf16>(xs), .transposed_dy = data<bf16>(dys)};
    const Term::Gradients gradients{.x = data<bf16>(dx), .gates = term.begin ? data<float>(*dgates) : nullptr,
                                    .up = data<bf16>(dweights[2 * i]), .down = data<bf16>(dweights[2 * i + 1])};
    term.backward(data<const bf16>(dy), data<const bf16>(kept[i]), factors, data<bf16>(dxs), gradients);
  });
  std::vector<Tensor> results{dx};
  if (gates) results.push_back(to(*dgates, gates->scalar_type()));
  results.insert(results.end(), dweights.begin(), dweights.end());
  return results;
}

STABLE_TORCH_LIBRARY_IMPL(expert_threshold, CPU, m) {
  m.impl("experts_forward", TORCH_BOX(&forward));
  m.impl("experts_backward", TORCH_BOX(&backward));
}

}  // namespace
}  // namespace experts
