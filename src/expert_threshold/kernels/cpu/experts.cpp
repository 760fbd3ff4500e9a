// A routed sum of relu² experts, forward and backward, in bfloat16: y_t = Σ_e z[t,e] g[t,e] down_e · relu(up_e x_t)².
//
// Rows are pairs of a token and one of its experts, ordered by expert, then token. They are computed in blocks that
// stay in a core's cache: gathered, multiplied, squared and multiplied again, so that only the hidden activations that
// backward needs are written out. Weights are packed for the products on the fly. Sums over a token's experts and over
// an expert's tokens run in a fixed order, whatever the number of threads.
//
// With `token` and `begin` null, row r is token r of one expert without gates: a feed-forward.

#include "common.h"

namespace {

constexpr int64_t ROWS = 256;       // in a block, whose rows and activations fit a cache of 2 MiB
constexpr int64_t TILE_ROWS = 256;  // of a tile of the weights' gradient, summed in float32
constexpr int64_t TILE_COLUMNS = 768;

struct Rows {  // a block of an expert; `padded` is where it begins if every block is rounded up to 32 rows
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

// Calls then(from, to) on each thread, with neighbouring blocks, which share packed weights, and balanced row counts.
template <class Then>
void for_neighbours(const std::vector<Rows>& blocks, Then&& then) {
  const int64_t threads = at::get_num_threads(),
                rows = blocks.empty() ? 0 : blocks.back().padded + blocks.back().rounded;
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

// Writes c (rows, columns), times the rows' scale, to `out`, whose rows are `width` apart.
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

}  // namespace

extern "C" {

// The number of rows if each block is rounded up to whole tiles.
int64_t et_padded(const int64_t* first, int64_t experts) {
  const auto blocks = blocks_of(first, experts);
  return blocks.empty() ? 0 : blocks.back().padded + blocks.back().rounded;
}

// The offsets (experts + 1,) of each expert's rows for an assignment (tokens, experts).
void et_count(const uint8_t* assignment, int64_t tokens, int64_t experts, int64_t* first) {
  std::fill_n(first, experts + 1, 0);
  for_assigned(assignment, tokens, experts, [&](int64_t, int64_t e) { ++first[e + 1]; });
  for (int64_t e = 0; e < experts; ++e) first[e + 1] += first[e];
}

// The rows' tokens; the offsets (tokens + 1,) of each token's pairs, and their rows.
void et_order(const uint8_t* assignment, int64_t tokens, int64_t experts, const int64_t* first, int32_t* token,
              int32_t* begin, int32_t* slot) {
  std::vector<int64_t> next(first, first + experts);
  std::fill_n(begin, tokens + 1, 0);
  int32_t pairs = 0;
  for_assigned(assignment, tokens, experts, [&](int64_t t, int64_t e) {
    token[next[e]] = int32_t(t);
    slot[pairs++] = int32_t(next[e]++);
    begin[t + 1] = pairs;
  });
  for (int64_t t = 0; t < tokens; ++t) begin[t + 1] = std::max(begin[t], begin[t + 1]);
}

// gates: (tokens, experts). kept: (pairs, hidden), relu of the pre-activations, or null; ys: (pairs, width), a buffer
// for the experts' outputs, or y itself if `begin` is null; otherwise results are added to y if `add`.
void et_forward(const bf16* x, const float* gates, const bf16* up, const bf16* down, const int64_t* first,
                const int32_t* token, const int32_t* begin, const int32_t* slot, int64_t tokens, int64_t experts,
                int64_t width, int64_t hidden, bool add, bf16* kept, bf16* ys, bf16* y) {
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

// dgates: (tokens, experts), zero where nothing is assigned. dxs and dx: like ys and y. Buffers for the factors of the
// weights' gradients, by block, `padded` rows in all (see et_padded): transposed_dh (hidden, padded), packed_a (padded,
// hidden), packed_x (padded, width), transposed_dy (width, padded).
void et_backward(const bf16* dy, const bf16* x, const float* gates, const bf16* up, const bf16* down,
                 const int64_t* first, const int32_t* token, const int32_t* begin, const int32_t* slot, int64_t tokens,
                 int64_t experts, int64_t width, int64_t hidden, bool add, const bf16* kept, bf16* transposed_dh,
                 bf16* packed_a, bf16* packed_x, bf16* transposed_dy, bf16* dxs, bf16* dx, float* dgates, bf16* dup,
                 bf16* ddown) {
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

}  // extern "C"
