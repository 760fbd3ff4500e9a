// One forward pass of a whole model for a few tokens, each appended to a sequence in a row of the cache.
//
// Activations are float32; weights and cache are float32 or bfloat16. Each number of the result is summed by one thread
// in an order that depends on neither the other tokens nor the number of threads. Fused multiply-adds are explicit,
// since a compiler would choose them differently for one token and for several. So a sequence gets the same bits alone
// and in a batch. Weights are read once per four tokens; weights of experts without tokens are not read.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include <omp.h>

#include "operators.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

using c10::BFloat16;

// Each weight is (out, in); experts' weights are concatenated. Without a gate it is relu²; hidden 0: no feed-forward.
template <class W>
struct FeedForward {
  const W *up, *down, *gate;
  int64_t hidden;
};

// The product of a gate's weights (outputs, channels) with the first channels of its input; channels 0: no gate.
template <class W>
struct Gate {
  const W* weight;
  int64_t channels;
};

template <class W>
struct Layer {
  const W *qkv, *output;
  const float* values;  // (vocab, kv_heads · head_dim), times 3 σ(values_gate), added to the values; null if absent
  Gate<W> values_gate;
  int64_t window;        // how many earlier tokens a token attends to
  float residual, skip;  // the layer's input is residual · x + skip · the first layer's input
  FeedForward<W> dense, expert;
  const float* router;   // (scores, d_model), experts first; other scores only enter the softmax of the gates
  const float* cutoffs;  // (rows, experts); null if every token goes to `chosen` experts
  const float* bias;     // (experts), added to scores to choose them
  int64_t experts, scores, chosen;
  bool softmax_gates, divide_by_fanout;
};

// A model of weights and a cache of type W, with the tensors that it points to and its working memory.
template <class W>
struct Model {
  int64_t d_model, heads, kv_heads, head_dim, vocab, rows, places;
  const float* embed;  // (vocab, d_model)
  const W* head;       // (vocab, d_model)
  const float *cos, *sin;  // (places - 1, head_dim / 2)
  float qk_scale;          // factor of queries and keys after their norm
  int64_t offset_from;     // layers from this one on write the slow half of each key for the next token
  W* cache;                // (layers, rows, places, 2, kv_heads, head_dim)
  W* last;                 // (rows, d_model): the embedding of each row's last token, if there is a smear gate
  Gate<W> smear_gate;      // times `smear`, the factor of the previous token's embedding
  float smear, backout;    // the head reads norm(x - backout · the middle layer's output)
  float eps, softcap;
  std::vector<Layer<W>> layers;
  std::vector<Tensor> kept;
  Tensor scratch;

  template <class T>
  T* keep(const Tensor& tensor) {
    kept.push_back(contiguous(tensor));
    return data<T>(kept.back());
  }

  const float* numbers(const std::optional<Tensor>& tensor) { return tensor ? keep<const float>(*tensor) : nullptr; }

  Gate<W> gate(const std::optional<Tensor>& weights) {
    if (!weights) return {};
    return {keep<const W>(*weights), weights->size(1)};
  }

  // weights: up, down and, if there is one, gate; empty for no feed-forward.
  FeedForward<W> feed_forward(const std::vector<Tensor>& weights) {
    if (weights.empty()) return {};
    const W* gate = weights.size() > 2 ? keep<const W>(weights[2]) : nullptr;
    return {keep<const W>(weights[0]), keep<const W>(weights[1]), gate, weights[1].size(-1)};
  }
};

#ifdef __AVX512F__
constexpr int LANES = 16, OUTPUTS = 4;  // 16 sums of 4 outputs and 4 tokens in registers
#else
constexpr int LANES = 8, OUTPUTS = 2;
#endif
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

inline Floats load(const float* p) {
  Floats v;
  memcpy(&v, p, sizeof v);
  return v;
}

inline Floats load(const BFloat16* p) {
#ifdef __AVX512F__  // GCC's own code would have three times as many instructions
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  Halves v;
  memcpy(&v, p, sizeof v);
  return (Floats)(__builtin_convertvector(v, Words) << 16);
#endif
}

// Loads the first `count` numbers, followed by zeros.
template <class W>
inline Floats load_some(const W* p, int64_t count) {
  W some[LANES] = {};
  memcpy(some, p, count * sizeof(W));
  return load(some);
}

// a b + c, rounded once if the processor has fused multiply-add.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline float multiply_add(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline float total(Floats v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)v);
#endif
  float parts[LANES];
  memcpy(parts, &v, sizeof v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) parts[i] += parts[i + width];
  return parts[0];
}

// e^x to a relative error of about 1e-7. NaN stays NaN. Plain arithmetic, which compilers vectorize.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  float shifted = multiply_add(x, 1.44269504f, 127.5f);  // positive, so that truncation rounds the exponent
  int32_t exponent = int32_t(shifted == shifted ? shifted : 127.5f);
  float whole = float(exponent - 127);
  float rest = multiply_add(whole, 2.12194440e-4f, multiply_add(whole, -0.693359375f, x));
  float value = 1.9875691500e-4f;
  value = multiply_add(value, rest, 1.3981999507e-3f);
  value = multiply_add(value, rest, 8.3334519073e-3f);
  value = multiply_add(value, rest, 4.1665795894e-2f);
  value = multiply_add(value, rest, 1.6666665459e-1f);
  value = multiply_add(value, rest, 5.0000001201e-1f);
  value = multiply_add(value * rest, rest, rest) + 1;
  int32_t bits = exponent << 23;
  float power;
  memcpy(&power, &bits, 4);
  return value * power;
}

constexpr int AHEAD = 16384;  // bytes to prefetch; the hardware prefetcher starts too late on such short matrices

template <int J, int R, class W>
inline void tile(const W* w, int64_t stride, int64_t length, const float* const* x, float (*sums)[R]) {
  Floats partial[J][R] = {};
  int64_t i = 0;
  for (; i + LANES <= length; i += LANES) {
    Floats xs[R];
    for (int r = 0; r < R; r++) xs[r] = load(x[r] + i);
    for (int j = 0; j < J; j++) {
      Floats ws = load(w + j * stride + i);
      // Adjacent rows form one sequence, prefetched in order whatever the order in which they are read.
      __builtin_prefetch((const char*)(w + (stride == length ? J * i + j * LANES : j * stride + i)) + AHEAD);
      for (int r = 0; r < R; r++) partial[j][r] = multiply_add(ws, xs[r], partial[j][r]);
    }
  }
  if (i < length)
    for (int r = 0; r < R; r++) {
      Floats xs = load_some(x[r] + i, length - i);
      for (int j = 0; j < J; j++)
        partial[j][r] = multiply_add(load_some(w + j * stride + i, length - i), xs, partial[j][r]);
    }
  for (int j = 0; j < J; j++)
    for (int r = 0; r < R; r++) sums[j][r] = total(partial[j][r]);
}

template <int J, int R, class W, class Done>
inline void tiles(const W* w, int64_t stride, int64_t o, int64_t length, const float* const* x, int64_t r, Done done) {
  float sums[J][R];
  tile<J, R>(w + o * stride, stride, length, x + r, sums);
  for (int i = 0; i < R; i++)
    for (int j = 0; j < J; j++) done(r + i, o + j, sums[j][i]);
}

template <int J, class W, class Done>
inline int64_t outputs(const W* w, int64_t stride, int64_t o, int64_t end, int64_t length, const float* const* x,
                       int64_t count, Done done) {
  for (; o + J <= end; o += J) {
    int64_t r = 0;
    for (; r + 4 <= count; r += 4) tiles<J, 4>(w, stride, o, length, x, r, done);
    if (count - r == 3) tiles<J, 3>(w, stride, o, length, x, r, done);
    if (count - r == 2) tiles<J, 2>(w, stride, o, length, x, r, done);
    if (count - r == 1) tiles<J, 1>(w, stride, o, length, x, r, done);
  }
  return o;
}

// Calls done(r, o, ⟨w_o, x_r⟩) for every token r and output o in [begin, end). Rows of w are `stride` apart.
template <class W, class Done>
void product(const W* w, int64_t stride, int64_t begin, int64_t end, int64_t length, const float* const* x,
             int64_t count, Done done) {
  if (count == 1)
    for (; begin + 8 <= end; begin += 8) tiles<8, 1>(w, stride, begin, length, x, 0, done);
  begin = outputs<OUTPUTS>(w, stride, begin, end, length, x, count, done);
  outputs<1>(w, stride, begin, end, length, x, count, done);
}

template <class W>
inline float dot(const W* w, const float* x, int64_t length) {
  float sum;
  tile<1, 1>(w, 0, length, &x, (float (*)[1]) & sum);
  return sum;
}

inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// Writes x / rms(x) · `to` to y.
void normalise(const float* x, int64_t length, float eps, float* y, float to = 1) {
  float scale = to / std::sqrt(dot(x, x, length) / float(length) + eps);
  for (int64_t i = 0; i < length; i++) y[i] = x[i] * scale;
}

// Replaces x by e^(x - highest); returns the sum.
float exponentials(float* x, int64_t length, float highest) {
  Floats sums = {};
  int64_t i = 0;
  for (; i + LANES <= length; i += LANES) {
    for (int lane = 0; lane < LANES; lane++) x[i + lane] = exponential(x[i + lane] - highest);
    sums += load(x + i);
  }
  float sum = total(sums);
  for (; i < length; i++) sum += x[i] = exponential(x[i] - highest);
  return sum;
}

// Replaces x by softcap · tanh(x / softcap). If this were inlined, GCC would not vectorize it.
[[gnu::noinline]] void cap(float* x, int64_t length, float softcap) {
  for (int64_t i = 0; i < length; i++) x[i] = softcap - 2 * softcap / (1 + exponential(2 / softcap * x[i]));
}

// The tokens that go to one expert.
struct Group {
  int64_t expert, first;  // the expert, and the index of its first pair
  std::vector<int64_t> tokens;
  std::vector<const float*> inputs;
};

// The state of one thread: small values that each thread recomputes, which is faster than waiting for another.
struct Own {
  std::vector<float> normed, scores, gates, weights;
  std::vector<const float*> inputs;
  std::vector<uint8_t> taken;
  std::vector<Group> groups;
};

struct Range {
  int64_t begin, end;
};

// One forward pass. Tokens have an id, a row of the cache and a position in it, before the row's last one.
template <class W>
struct Pass {
  const Model<W>& model;
  const std::vector<int64_t>&ids, &rows, &places;
  const int64_t count, first;  // tokens, and from which one on logits are computed
  float *x, *start, *middle, *heads, *read, *hidden, *gate;
  float* logits;    // (count - first, vocab)
  double* peaks;    // each row's argmax, maximum and log Σ e^logit
  float* scores;    // (MoE layers, count, scores)
  bool* assignment;  // (MoE layers, count, experts)
  int64_t assigned = 0;  // the total number of assigned pairs
  int64_t threads = 1;

  void barrier() const {
#pragma omp barrier
  }

  int64_t layers() const { return int64_t(model.layers.size()); }

  Range share(int64_t thread, int64_t outputs) {
    int64_t each = ((outputs + threads - 1) / threads + 15) / 16 * 16;  // whole vectors
    int64_t begin = thread * each < outputs ? thread * each : outputs;
    return {begin, begin + each < outputs ? begin + each : outputs};
  }

  void normalise_all(Own& own) {
    int64_t d = model.d_model;
    for (int64_t r = 0; r < count; r++) normalise(x + r * d, d, model.eps, &own.normed[r * d]);
  }

  W* cached(int64_t layer, int64_t row, int64_t place) {
    int64_t numbers = 2 * model.kv_heads * model.head_dim;
    return model.cache + ((layer * model.rows + row) * model.places + place) * numbers;
  }

  void turn(float* head, int64_t place) {
    int64_t half = model.head_dim / 2;
    const float *cos = model.cos + place * half, *sin = model.sin + place * half;
    for (int64_t i = 0; i < half; i++) {
      float a = head[i], b = head[i + half];
      head[i] = a * cos[i] + b * sin[i];
      head[i + half] = b * cos[i] - a * sin[i];
    }
    normalise(head, model.head_dim, model.eps, head, model.qk_scale);
  }

  float gated(const Gate<W>& gate, int64_t output, const float* input) {
    return sigmoid(dot(gate.weight + output * gate.channels, input, gate.channels));
  }

  // Computes the first layer's input: the tokens' embeddings, each smeared with the previous token's.
  void embed() {
    int64_t d = model.d_model;
    for (int64_t r = 0; r < count; r++) {
      float* to = start + r * d;
      normalise(model.embed + ids[r] * d, d, model.eps, to);
      if (!model.smear_gate.channels) continue;
      float gate = model.smear * gated(model.smear_gate, 0, to);
      W* last = model.last + rows[r] * d;
      for (int64_t i = 0; i < d; i++) {
        float own = to[i];
        to[i] = multiply_add(gate, float(last[i]), own);
        last[i] = own;
      }
    }
    memcpy(x, start, count * d * sizeof(float));
  }

  // Turns a range of x, a layer's output or the embedding, into the next layer's input or, after the last, the head's.
  void pass_on(int64_t index, Range range) {
    int64_t d = model.d_model, next = index + 1;
    for (int64_t r = 0; r < count; r++) {
      float *now = x + r * d, *first = start + r * d, *halfway = middle + r * d;
      if (index == layers() / 2) std::copy(now + range.begin, now + range.end, halfway + range.begin);
      if (next == layers()) {
        for (int64_t i = range.begin; i < range.end; i++) now[i] = multiply_add(-model.backout, halfway[i], now[i]);
      } else {
        const Layer<W>& to = model.layers[next];
        for (int64_t i = range.begin; i < range.end; i++)
          now[i] = multiply_add(to.skip, first[i], to.residual * now[i]);
      }
    }
  }

  // Rotates the queries and the key of one key-value head of a token, adds the value embedding to the value, and writes
  // key and value to the cache.
  void remember(int64_t index, int64_t r, int64_t kv, Own& own) {
    const Layer<W>& layer = model.layers[index];
    int64_t length = model.head_dim, group = model.heads / model.kv_heads, place = places[r];
    float* of_token = heads + r * (model.heads + 2 * model.kv_heads) * length;
    float *key = of_token + (model.heads + kv) * length, *value = key + model.kv_heads * length;
    for (int64_t q = kv * group; q < (kv + 1) * group; q++) turn(of_token + q * length, place);
    turn(key, place);
    if (layer.values) {
      float gate = 3 * gated(layer.values_gate, kv, own.inputs[r]);
      const float* embedded = layer.values + (ids[r] * model.kv_heads + kv) * length;
      for (int64_t i = 0; i < length; i++) value[i] = multiply_add(gate, embedded[i], value[i]);
    }
    W *keys = cached(index, rows[r], place) + kv * length, *values = keys + model.kv_heads * length;
    W* next = cached(index, rows[r], place + 1) + kv * length;
    for (int64_t i = 0; i < length; i++) {
      bool slow = index >= model.offset_from && i % (length / 2) >= length / 2 - length / 4;
      (slow ? next : keys)[i] = key[i];
      values[i] = value[i];
    }
  }

  // Attention for one key-value head of a token: softmax(q kᵀ / √head_dim) v over its window and its own position.
  void attend(int64_t index, int64_t r, int64_t kv, Own& own) {
    int64_t length = model.head_dim, group = model.heads / model.kv_heads;
    int64_t before = std::min(model.layers[index].window, places[r]), seen = before + 1;
    int64_t stride = 2 * model.kv_heads * length;
    const W* keys = cached(index, rows[r], places[r] - before) + kv * length;
    const W* values = keys + model.kv_heads * length;
    float scale = 1 / std::sqrt(float(length));
    for (int64_t q = kv * group; q < (kv + 1) * group; q++) {
      const float* query = heads + (r * (model.heads + 2 * model.kv_heads) + q) * length;
      float *weights = own.weights.data(), highest = -INFINITY;
      product(keys, stride, 0, seen, length, &query, 1, [&](int64_t, int64_t place, float dot) {
        weights[place] = dot * scale;
        highest = weights[place] > highest ? weights[place] : highest;
      });
      float sum = exponentials(weights, seen, highest);
      float* out = read + (r * model.heads + q) * length;
      int64_t i = 0;
      for (; i + LANES <= length; i += LANES) {
        Floats mean = {};
        for (int64_t place = 0; place < seen; place++)
          mean = multiply_add(Floats{} + weights[place], load(values + place * stride + i), mean);
        mean /= sum;
        memcpy(out + i, &mean, sizeof mean);
      }
      for (; i < length; i++) {
        float mean = 0;
        for (int64_t place = 0; place < seen; place++)
          mean = multiply_add(weights[place], float(values[place * stride + i]), mean);
        out[i] = mean / sum;
      }
    }
  }

  // Computes this thread's share of the hidden activations of some inputs, each in a row of `to`.
  void activate(const FeedForward<W>& ff, int64_t expert, const float* const* inputs, int64_t count, Range range,
                float* to, float* gates) {
    int64_t d = model.d_model, width = ff.hidden, offset = expert * width * d;
    product(ff.up + offset, d, range.begin, range.end, d, inputs, count,
            [&](int64_t r, int64_t o, float up) { to[r * width + o] = up; });
    if (ff.gate)
      product(ff.gate + offset, d, range.begin, range.end, d, inputs, count,
              [&](int64_t r, int64_t o, float up) { gates[r * width + o] = up; });
    for (int64_t r = 0; r < count; r++) {
      float *h = to + r * width, *g = gates + r * width;
      if (ff.gate)
        for (int64_t o = range.begin; o < range.end; o++) h[o] *= g[o] / (1 + exponential(-g[o]));
      else
        for (int64_t o = range.begin; o < range.end; o++) h[o] = h[o] < 0 ? 0 : h[o] * h[o];
    }
  }

  // Computes scores and the assignment; each expert's tokens are in order.
  void route(const Layer<W>& layer, Own& own) {
    int64_t experts = layer.experts, width = layer.scores;
    product(layer.router, model.d_model, 0, width, model.d_model, own.inputs.data(), count,
            [&](int64_t r, int64_t e, float score) { own.scores[r * width + e] = score; });
    for (int64_t r = 0; r < count; r++) {
      const float* of_token = &own.scores[r * width];
      uint8_t* taken = &own.taken[r * experts];
      if (layer.cutoffs) {
        const float* cutoffs = layer.cutoffs + rows[r] * experts;
        for (int64_t e = 0; e < experts; e++) taken[e] = of_token[e] > cutoffs[e];
      } else {
        choose(layer, of_token, taken);
      }
      int64_t fanout = 0;
      for (int64_t e = 0; e < experts; e++) fanout += taken[e];
      float divisor = layer.divide_by_fanout && fanout ? float(fanout) : 1;
      float highest = *std::max_element(of_token, of_token + width), sum = 0;
      if (layer.softmax_gates)
        for (int64_t e = 0; e < width; e++) sum += std::exp(of_token[e] - highest);
      for (int64_t e = 0; e < experts; e++)
        if (taken[e]) {
          float gate = layer.softmax_gates ? std::exp(of_token[e] - highest) / sum : sigmoid(of_token[e]);
          own.gates[r * experts + e] = gate / divisor;
        }
    }
    own.groups.clear();
    int64_t pairs = 0;
    for (int64_t e = 0; e < experts; e++) {
      Group group{e, pairs, {}, {}};
      for (int64_t r = 0; r < count; r++)
        if (own.taken[r * experts + e]) {
          group.tokens.push_back(r);
          group.inputs.push_back(own.inputs[r]);
        }
      pairs += int64_t(group.tokens.size());
      if (group.tokens.size()) own.groups.push_back(std::move(group));
    }
  }

  // Chooses the experts with the highest score + bias; ties go to the lower expert.
  static void choose(const Layer<W>& layer, const float* of_token, uint8_t* taken) {
    memset(taken, 0, layer.experts);
    for (int64_t i = 0; i < layer.chosen; i++) {
      int64_t best = -1;
      const auto key = [&](int64_t e) { return of_token[e] + layer.bias[e]; };
      for (int64_t e = 0; e < layer.experts; e++)
        if (!taken[e] && (best < 0 || key(e) > key(best))) best = e;
      taken[best] = 1;
    }
  }

  void feed_forward(const Layer<W>& layer, int64_t thread, Own& own) {
    int64_t d = model.d_model, wide = layer.dense.hidden, narrow = layer.expert.hidden;
    float *of_pairs = hidden + count * wide, *gates_of_pairs = gate + count * wide;
    normalise_all(own);
    if (wide) activate(layer.dense, 0, own.inputs.data(), count, share(thread, wide), hidden, gate);
    if (layer.experts) {
      route(layer, own);
      for (Group& group : own.groups)
        activate(layer.expert, group.expert, group.inputs.data(), group.inputs.size(), share(thread, narrow),
                 of_pairs + group.first * narrow, gates_of_pairs + group.first * narrow);
    }
    barrier();
    Range range = share(thread, d);
    std::vector<const float*> inputs(count);
    for (int64_t r = 0; r < count; r++) inputs[r] = hidden + r * wide;
    if (wide)
      product(layer.dense.down, wide, range.begin, range.end, wide, inputs.data(), count,
              [&](int64_t r, int64_t o, float y) { x[r * d + o] += y; });
    if (layer.experts)
      for (Group& group : own.groups) {
        for (size_t i = 0; i < group.tokens.size(); i++) inputs[i] = of_pairs + (group.first + i) * narrow;
        const W* down = layer.expert.down + group.expert * d * narrow;
        product(down, narrow, range.begin, range.end, narrow, inputs.data(), group.tokens.size(),
                [&](int64_t i, int64_t o, float y) {
                  int64_t r = group.tokens[i];
                  x[r * d + o] += own.gates[r * layer.experts + group.expert] * y;
                });
      }
  }

  void attention(int64_t index, int64_t thread, Own& own) {
    const Layer<W>& layer = model.layers[index];
    int64_t d = model.d_model, length = model.head_dim;
    int64_t width = (model.heads + 2 * model.kv_heads) * length, reads = model.heads * length;
    normalise_all(own);
    Range range = share(thread, width);
    product(layer.qkv, d, range.begin, range.end, d, own.inputs.data(), count,
            [&](int64_t r, int64_t o, float y) { heads[r * width + o] = y; });
    barrier();
    int64_t items = count * model.kv_heads;
    for (int64_t i = thread; i < items; i += threads) remember(index, i / model.kv_heads, i % model.kv_heads, own);
    barrier();  // tokens of one sequence read each other's keys and values
    for (int64_t i = thread; i < items; i += threads) attend(index, i / model.kv_heads, i % model.kv_heads, own);
    barrier();
    std::vector<const float*> inputs(count);
    for (int64_t r = 0; r < count; r++) inputs[r] = read + r * reads;
    range = share(thread, d);
    product(layer.output, reads, range.begin, range.end, reads, inputs.data(), count,
            [&](int64_t r, int64_t o, float y) { x[r * d + o] += y; });
    barrier();
  }

  void run(int64_t thread) {
    int64_t d = model.d_model, most = 0, seen = 0;
    for (const Layer<W>& layer : model.layers) most = std::max(most, layer.scores);
    for (int64_t place : places) seen = std::max(seen, place + 1);
    Own own;
    own.normed.resize(count * d);
    own.scores.resize(count * most);
    own.gates.resize(count * most);
    own.taken.resize(count * most);
    own.weights.resize(seen);
    for (int64_t r = 0; r < count; r++) own.inputs.push_back(&own.normed[r * d]);
    if (thread == 0) {
      embed();
      pass_on(-1, {0, d});
    }
    barrier();
    int64_t routed = 0, scored = 0;
    for (int64_t i = 0; i < layers(); i++) {
      const Layer<W>& layer = model.layers[i];
      attention(i, thread, own);
      feed_forward(layer, thread, own);
      pass_on(i, share(thread, d));
      barrier();
      if (thread == 0 && layer.experts) {
        int64_t pairs = count * layer.experts, numbers = count * layer.scores;
        memcpy(scores + scored, own.scores.data(), numbers * sizeof(float));
        memcpy(assignment + routed, own.taken.data(), pairs);
        routed += pairs, scored += numbers;
        for (Group& group : own.groups) assigned += int64_t(group.tokens.size());
      }
    }
    predict(thread, own);
  }

  void predict(int64_t thread, Own& own) {
    int64_t d = model.d_model, vocab = model.vocab, asked = count - first;
    normalise_all(own);
    Range range = share(thread, vocab);
    product(model.head, d, range.begin, range.end, d, &own.inputs[first], asked,
            [&](int64_t r, int64_t o, float y) { logits[r * vocab + o] = y; });
    for (int64_t r = 0; r < asked; r++) cap(logits + r * vocab + range.begin, range.end - range.begin, model.softcap);
    barrier();
    for (int64_t r = thread; r < asked; r += threads) summarise(r);
  }

  void summarise(int64_t r) {
    const float* row = logits + r * model.vocab;
    int64_t likeliest = 0;
    for (int64_t o = 0; o < model.vocab && row[likeliest] == row[likeliest]; o++)
      if (!(row[o] <= row[likeliest])) likeliest = o;  // NaN counts as the highest
    float highest = row[likeliest], part[256];
    double sum = 0;
    for (int64_t o = 0; o < model.vocab; o += 256) {
      int64_t length = model.vocab - o < 256 ? model.vocab - o : 256;
      memcpy(part, row + o, length * sizeof(float));
      sum += exponentials(part, length, highest);
    }
    double* peak = peaks + 3 * r;
    peak[0] = double(likeliest), peak[1] = highest, peak[2] = highest + float(std::log(sum));
  }
};

using Decoder = std::variant<Model<float>, Model<BFloat16>>;

Decoder& decoder_at(int64_t handle) { return *reinterpret_cast<Decoder*>(handle); }

// Creates a model without layers; the caller deletes it. Parameters are as in Model.
int64_t create(const Tensor& embed, const Tensor& head, const Tensor& cos, const Tensor& sin, double qk_scale,
               int64_t offset_from, const Tensor& cache, const Tensor& last, const std::optional<Tensor>& smear_gate,
               double smear, double backout, double eps, double softcap) {
  STD_TORCH_CHECK(cache.is_contiguous() && last.is_contiguous(), "a decoder's cache is not contiguous");
  auto decoder = std::make_unique<Decoder>();
  if (cache.scalar_type() == ScalarType::BFloat16) decoder->emplace<Model<BFloat16>>();
  const auto fill = [&]<class W>(Model<W>& model) {
    model.vocab = embed.size(0), model.d_model = embed.size(1);
    model.rows = cache.size(1), model.places = cache.size(2);
    model.kv_heads = cache.size(4), model.head_dim = cache.size(5);
    model.embed = model.template keep<const float>(embed);
    model.head = model.template keep<const W>(head);
    model.cos = model.template keep<const float>(cos);
    model.sin = model.template keep<const float>(sin);
    model.qk_scale = float(qk_scale), model.offset_from = offset_from;
    model.cache = model.template keep<W>(cache);
    model.last = model.template keep<W>(last);
    model.smear_gate = model.gate(smear_gate);
    model.smear = float(smear), model.backout = float(backout);
    model.eps = float(eps), model.softcap = float(softcap);
    model.scratch = new_empty(embed, {0}, ScalarType::Float);
  };
  std::visit(fill, *decoder);
  return reinterpret_cast<int64_t>(decoder.release());
}

void destroy(int64_t decoder) { delete &decoder_at(decoder); }

// Appends a layer. dense, experts: weights as in `feed_forward`; other parameters as in Layer.
void add_layer(int64_t handle, const Tensor& qkv, const Tensor& output, const std::optional<Tensor>& values,
               const std::optional<Tensor>& values_gate, int64_t window, double residual, double skip,
               const std::vector<Tensor>& dense, const std::vector<Tensor>& experts,
               const std::optional<Tensor>& router, const std::optional<Tensor>& cutoffs,
               const std::optional<Tensor>& bias, int64_t chosen, bool softmax_gates, bool divide_by_fanout) {
  const auto add = [&]<class W>(Model<W>& model) {
    model.heads = output.size(1) / model.head_dim;
    model.layers.push_back({
        .qkv = model.template keep<const W>(qkv), .output = model.template keep<const W>(output),
        .values = model.numbers(values), .values_gate = model.gate(values_gate),
        .window = window, .residual = float(residual), .skip = float(skip),
        .dense = model.feed_forward(dense), .expert = model.feed_forward(experts),
        .router = model.numbers(router), .cutoffs = model.numbers(cutoffs), .bias = model.numbers(bias),
        .experts = experts.empty() ? 0 : experts[0].size(0), .scores = router ? router->size(0) : 0,
        .chosen = chosen, .softmax_gates = softmax_gates, .divide_by_fanout = divide_by_fanout,
    });
  };
  std::visit(add, decoder_at(handle));
}

// Runs the model and writes the tokens' keys and values to the cache. Returns logits, peaks, scores, assignment and the
// number of assigned pairs, as in Pass.
std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t> append(
    int64_t handle, const std::vector<int64_t>& ids, const std::vector<int64_t>& rows,
    const std::vector<int64_t>& places, int64_t first, int64_t threads) {
  const auto run = [&]<class W>(Model<W>& model) -> std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t> {
    int64_t count = ids.size(), asked = count - first, routed = 0, experts = 0, width = 0, hidden = 0;
    for (const Layer<W>& layer : model.layers) {
      hidden = std::max(hidden, layer.dense.hidden + layer.experts * layer.expert.hidden);
      if (layer.experts) routed++, experts = layer.experts, width = layer.scores;
    }
    int64_t d = model.d_model, reads = model.heads * model.head_dim;
    int64_t heads = reads + 2 * model.kv_heads * model.head_dim, size = count * (3 * d + heads + reads + 2 * hidden);
    if (model.scratch.numel() < size) model.scratch = new_empty(model.scratch, {size});
    float* free = data<float>(model.scratch);
    const auto take = [&](int64_t numbers) { return std::exchange(free, free + count * numbers); };
    const Tensor logits = new_empty(model.scratch, {asked, model.vocab});
    const Tensor peaks = new_empty(logits, {asked, 3}, ScalarType::Double);
    const Tensor scores = new_empty(logits, {routed, count, width});
    const Tensor assignment = new_empty(scores, {routed, count, experts}, ScalarType::Bool);
    Pass<W> pass{
        .model = model, .ids = ids, .rows = rows, .places = places, .count = count, .first = first,
        .x = take(d), .start = take(d), .middle = take(d), .heads = take(heads), .read = take(reads),
        .hidden = take(hidden), .gate = take(hidden),
        .logits = data<float>(logits), .peaks = data<double>(peaks),
        .scores = data<float>(scores), .assignment = data<bool>(assignment),
    };
    if (threads == 1) {  // a parallel region costs as much as a few small layers
      pass.run(0);
    } else {
#pragma omp parallel num_threads(threads)
      {
#pragma omp single
        pass.threads = omp_get_num_threads();
        pass.run(omp_get_thread_num());
      }
    }
    return {logits, peaks, scores, assignment, pass.assigned};
  };
  return std::visit(run, decoder_at(handle));
}

// Samples a token from logits (vocab) by top-k (`most`), then top-p. The candidates' weights e^(logit / temperature)
// are accumulated from the likeliest down, or in the order of ids if neither limits them; `number` in [0, 1) selects
// the candidate at that share of the sum. Returns -1 if a logit is NaN.
int64_t sample(const Tensor& given, double temperature, int64_t most, double top_p, double number) {
  const float* logits = data<const float>(given);
  const int64_t vocab = given.size(0);
  float highest = -INFINITY;
  for (int64_t i = 0; i < vocab; i++) {
    if (logits[i] != logits[i]) return -1;
    highest = highest < logits[i] ? logits[i] : highest;
  }
  const auto weight = [&](int64_t i) { return std::exp((double(logits[i]) - highest) / temperature); };
  std::vector<uint64_t> order(vocab);  // the logit's bits, encoded so that higher logits sort first, then the id
  for (int64_t i = 0; i < vocab; i++) {
    uint32_t bits;
    memcpy(&bits, logits + i, 4);
    order[i] = uint64_t(bits >> 31 ? bits : ~bits & 0x7FFFFFFF) << 32 | uint64_t(i);
  }
  const auto id = [](uint64_t place) { return int64_t(uint32_t(place)); };
  most = most < vocab ? most : vocab;
  double total = 0;  // of all weights; with top_p alone, usually few tokens need sorting
  const bool some = most == vocab && top_p < 1;
  if (some)
    for (int64_t i = 0; i < vocab; i++) total += weight(i);
  std::vector<double> sums;
  for (int64_t sorted = some ? std::min<int64_t>(64, most) : most;; sorted = std::min(32 * sorted, most)) {
    const auto end = order.begin() + sorted;
    if (sorted == vocab && !some) {
    } else if (sorted <= 256) {
      std::partial_sort(order.begin(), end, order.end());  // fastest for a few
    } else {
      std::nth_element(order.begin(), end, order.end());
      std::sort(order.begin(), end);
    }
    sums.clear();
    double sum = 0;
    for (int64_t i = 0; i < sorted; i++) sums.push_back(sum += weight(id(order[i])));
    if (sorted == most || sum >= top_p * total) break;
  }
  if (!some) total = sums.back();
  int64_t kept = int64_t(sums.size());
  if (top_p < 1) kept = std::lower_bound(sums.begin(), sums.end() - 1, top_p * total) - sums.begin() + 1;
  int64_t place = std::upper_bound(sums.begin(), sums.begin() + kept - 1, number * sums[kept - 1]) - sums.begin();
  return id(order[place]);
}

STABLE_TORCH_LIBRARY_IMPL(expert_threshold, CompositeExplicitAutograd, m) {
  m.impl("decoder_create", TORCH_BOX(&create));
  m.impl("decoder_destroy", TORCH_BOX(&destroy));
  m.impl("decoder_add_layer", TORCH_BOX(&add_layer));
  m.impl("decoder_append", TORCH_BOX(&append));
  m.impl("decoder_sample", TORCH_BOX(&sample));
}

}  // namespace
