// Attention inside each sequence of a flat pack on a CPU, causal or to all keys of the sequence, forward and backward.
//
// `varlen_cpu.py` says what is computed and calls the functions at the end of this file. A thread takes a sequence and
// a key head, packs its keys and values once as float32, and goes through the query heads that share them in tiles of
// TILE_ROWS queries, backward in blocks of BLOCK, whose scores stay in its cache. All products are of tiles of TILE_ROWS
// by PANEL, with which less than a panel of scores beyond a tile's diagonal is computed. The exponentials are powers of
// two: log2(e) is part of the queries' scale.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr long LANES = 16, TILE_ROWS = 8;
#elif defined(__AVX2__)
constexpr long LANES = 8, TILE_ROWS = 4;
#else
constexpr long LANES = 4, TILE_ROWS = 4;
#endif
constexpr long PANEL = 2 * LANES;
constexpr long BLOCK = 32;
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504088896340736f;

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(int32_t))));

struct Bfloat16 {
    uint16_t bits;
};

inline float read(float number) { return number; }

inline float read(Bfloat16 number) {
    const uint32_t bits = uint32_t(number.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

inline void write(float number, float* place) { *place = number; }

inline void write(float number, Bfloat16* place) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;  // rounding could make it infinite
    place->bits = is_nan ? 0x7fc0 : rounded;
}

inline Floats load(const float* place) {
    Floats result;
    std::memcpy(&result, place, sizeof result);
    return result;
}

inline void store(Floats numbers, float* place) { std::memcpy(place, &numbers, sizeof numbers); }

inline long round_up(long number, long step) { return (number + step - 1) / step * step; }

// 2^x for x <= 0, within 2e-7 of it; 0 below the smallest normal number.
inline Floats exp2(Floats x) {
    const Floats magic = Floats{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const Floats whole = (x + magic) - magic;
    const Floats rest = (x - whole) * 0.693147180559945f;
    Floats power = Floats{} + 1.0f / 720;
    power = power * rest + 1.0f / 120;
    power = power * rest + 1.0f / 24;
    power = power * rest + 1.0f / 6;
    power = power * rest + 0.5f;
    power = power * rest + 1.0f;
    power = power * rest + 1.0f;
    const Ints exponent = (__builtin_convertvector(whole, Ints) + 127) << 23;
    Floats scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    return x < -126.0f ? Floats{} : power * scale;  // not a number stays not a number
}

inline float add_up(Floats numbers) {
    float result = 0;
    for (long lane = 0; lane < LANES; ++lane) result += numbers[lane];
    return result;
}

// c[m, n] (+)= sum over k of a[m * row + k * step] * b[k * ldb + n] for TILE_ROWS by PANEL.
template <bool ADD>
inline void multiply_tile(const float* a, long row, long step, const float* b, long ldb, long depth, float* c,
                          long ldc) {
    Floats left[TILE_ROWS], right[TILE_ROWS];
    for (long m = 0; m < TILE_ROWS; ++m) {
        left[m] = ADD ? load(c + m * ldc) : Floats{};
        right[m] = ADD ? load(c + m * ldc + LANES) : Floats{};
    }
    for (long k = 0; k < depth; ++k) {
        const Floats b_left = load(b + k * ldb), b_right = load(b + k * ldb + LANES);
        for (long m = 0; m < TILE_ROWS; ++m) {
            const float factor = a[m * row + k * step];
            left[m] += factor * b_left;
            right[m] += factor * b_right;
        }
    }
    for (long m = 0; m < TILE_ROWS; ++m) {
        store(left[m], c + m * ldc);
        store(right[m], c + m * ldc + LANES);
    }
}

// The same for `columns` columns, a multiple of PANEL.
template <bool ADD>
inline void multiply(const float* a, long row, long step, const float* b, long ldb, long depth, float* c, long ldc,
                     long columns) {
    for (long n = 0; n < columns; n += PANEL) multiply_tile<ADD>(a, row, step, b + n, ldb, depth, c + n, ldc);
}

// [rows, size] with `stride` between rows as float32 times `scale`, rows of `width` with zeros after `size`.
template <typename T>
void pack_rows(const T* from, long stride, long rows, long size, float scale, float* to, long width) {
    for (long r = 0; r < rows; ++r) {
        for (long d = 0; d < size; ++d) to[r * width + d] = read(from[r * stride + d]) * scale;
        std::fill(to + r * width + size, to + (r + 1) * width, 0.0f);
    }
}

// A row of float32 times `scale` as T.
template <typename T>
void unpack_row(const float* from, long size, float scale, T* to) {
    for (long d = 0; d < size; ++d) write(from[d] * scale, to + d);
}

// The transpose [size, rows] as panels [size, PANEL], one after the other, with zeros after `rows`.
template <typename T>
void pack_panels(const T* from, long stride, long rows, long size, float* to) {
    for (long first = 0; first < rows; first += PANEL, to += size * PANEL) {
        const long count = std::min(PANEL, rows - first);
        if (count < PANEL) std::fill(to, to + size * PANEL, 0.0f);
        for (long r = 0; r < count; ++r)
            for (long d = 0; d < size; ++d) to[d * PANEL + r] = read(from[(first + r) * stride + d]);
    }
}

struct Pack {
    const int32_t* bounds;    // of the sequences' queries
    const int32_t* bounds_k;  // of their keys
    const float* sinks;       // of the query heads: logits of a key with value 0, or no address
    long sequences, heads, groups, size, value_size;
    float scale;
    long window;  // below 0: a query sees all keys of its sequence

    float sink(long head) const { return sinks ? sinks[head] * LOG2_E : -INF; }
    long width() const { return round_up(size, PANEL); }
    long value_width() const { return round_up(value_size, PANEL); }
};

// One sequence's place in the pack.
struct Sequence {
    long index, start, length, start_k, length_k, window;

    Sequence(const Pack& pack, long index_)
        : index(index_), start(pack.bounds[index]), length(pack.bounds[index + 1] - start), start_k(pack.bounds_k[index]),
          length_k(pack.bounds_k[index + 1] - start_k), window(pack.window) {}

    // Query `index` sees the keys [first_key, last_key).
    long first_key(long index) const { return window > 0 ? std::max(0L, last_key(index) - window) : 0; }
    long last_key(long index) const { return window < 0 ? length_k : length_k - length + index + 1; }
    long stride() const { return round_up(length_k, PANEL) + LANES; }  // of scores; not a power of two
};

// The queries [first, first + rows) of a sequence, TILE_ROWS of them at most, and the scores that are computed for
// them: [low, width), of which the columns from `high` on are beyond the last query's own key.
struct Tile {
    long first, rows, low, high, width;

    Tile(const Sequence& sequence, long first_, long stop)
        : first(first_), rows(std::min(TILE_ROWS, stop - first_)),
          low(sequence.first_key(first) / PANEL * PANEL), high(sequence.last_key(first + rows - 1)),
          width(round_up(high, PANEL)) {}

    // Rows that are only padding see what the last one sees.
    long query(long row) const { return first + std::min(row, rows - 1); }
};

// scores[m, n] of a tile, from queries [TILE_ROWS, size] and keys in panels.
inline void score(const Tile& tile, const float* queries, long width, const float* panels, long size, float* scores,
                  long stride) {
    for (long column = tile.low; column < tile.width; column += PANEL)
        multiply_tile<false>(queries, width, 1, panels + column * size, PANEL, size, scores + column, stride);
}

// A row's power of the sink, and the sum of all powers.
struct Powers {
    float sink, sum;
};

// Scores of one row to powers of two that are at most 1, 0 outside [first, last).
Powers exponentiate(float* scores, const Tile& tile, long first, long last, float sink) {
    std::fill(scores + tile.low, scores + first, -INF);
    std::fill(scores + last, scores + tile.width, -INF);
    Floats largest = load(scores + tile.low);
    for (long n = tile.low + LANES; n < tile.width; n += LANES) {
        const Floats numbers = load(scores + n);
        largest = numbers > largest ? numbers : largest;
    }
    float top = sink;
    for (long lane = 0; lane < LANES; ++lane) top = std::max(top, largest[lane]);
    Floats sum{};
    for (long n = tile.low; n < tile.width; n += LANES) {
        const Floats power = exp2(load(scores + n) - top);
        store(power, scores + n);
        sum += power;
    }
    const float of_sink = std::exp2(sink - top);
    return {of_sink, add_up(sum) + of_sink};
}

// One row's gradients of probabilities to those of scores (without their scale), and powers to probabilities. Returns
// the mean gradient, weighted by the probabilities.
float differentiate(float* powers, float* grads, const Tile& tile, float sum) {
    const float inverse = 1 / sum;
    Floats products{};
    for (long n = tile.low; n < tile.width; n += LANES) {
        const Floats probabilities = load(powers + n) * inverse;
        store(probabilities, powers + n);
        products += probabilities * load(grads + n);
    }
    const float mean = add_up(products);
    for (long n = tile.low; n < tile.width; n += LANES)
        store(load(powers + n) * (load(grads + n) - mean), grads + n);
    return mean;
}

// A thread's memory.
struct Scratch {
    std::vector<float> queries, key_panels, value_panels, keys, values, grads, scores, grad_scores, result, grad_keys,
        grad_values;
};

float* room(std::vector<float>& memory, long size) {
    if (long(memory.size()) < size) memory.resize(size);
    return memory.data();
}

float* zeros(std::vector<float>& memory, long size) {
    std::fill_n(room(memory, size), size, 0.0f);
    return memory.data();
}

template <typename T>
void forward_sequence(const Pack& pack, const Sequence& sequence, long group, const T* query, const T* key,
                      const T* value, T* output, Scratch& scratch) {
    const long size = pack.size, value_size = pack.value_size, width = pack.value_width(), stride = sequence.stride();
    const long heads = pack.heads / pack.groups, keys = sequence.length_k;
    float* panels = room(scratch.key_panels, round_up(keys, PANEL) * size);
    float* values = room(scratch.values, keys * width);
    float* queries = zeros(scratch.queries, TILE_ROWS * size);
    float* scores = room(scratch.scores, TILE_ROWS * stride);
    float* result = room(scratch.result, TILE_ROWS * width);
    pack_panels(key + (sequence.start_k * pack.groups + group) * size, pack.groups * size, keys, size, panels);
    pack_rows(value + (sequence.start_k * pack.groups + group) * value_size, pack.groups * value_size, keys,
              value_size, 1.0f, values, width);
    for (long head = group * heads; head < (group + 1) * heads; ++head) {
        for (long first = 0; first < sequence.length; first += TILE_ROWS) {
            const Tile tile(sequence, first, sequence.length);
            const long place = (sequence.start + first) * pack.heads + head;
            float sums[TILE_ROWS];
            pack_rows(query + place * size, pack.heads * size, tile.rows, size, pack.scale * LOG2_E, queries, size);
            score(tile, queries, size, panels, size, scores, stride);
            for (long row = 0; row < TILE_ROWS; ++row) {
                const long index = tile.query(row);
                sums[row] = exponentiate(scores + row * stride, tile, sequence.first_key(index),
                                         sequence.last_key(index), pack.sink(head)).sum;
            }
            multiply<false>(scores + tile.low, stride, 1, values + tile.low * width, width, tile.high - tile.low,
                            result, width, width);
            for (long row = 0; row < tile.rows; ++row)
                unpack_row(result + row * width, value_size, 1 / sums[row],
                           output + (place + row * pack.heads) * value_size);
        }
    }
}

template <typename T>
void backward_sequence(const Pack& pack, const Sequence& sequence, long group, const T* grad, const T* query,
                       const T* key, const T* value, T* grad_query, T* grad_key, T* grad_value, float* grad_sinks,
                       Scratch& scratch) {
    const long size = pack.size, value_size = pack.value_size, width = pack.width(), value_width = pack.value_width();
    const long heads = pack.heads / pack.groups, keys = sequence.length_k, stride = sequence.stride();
    const long key_rows = round_up(keys, PANEL);
    float* key_panels = room(scratch.key_panels, key_rows * size);
    float* value_panels = room(scratch.value_panels, key_rows * value_size);
    float* key_numbers = room(scratch.keys, keys * width);
    float* queries = zeros(scratch.queries, BLOCK * width);
    float* grads = zeros(scratch.grads, BLOCK * value_width);
    float* scores = room(scratch.scores, BLOCK * stride);
    float* grad_scores = room(scratch.grad_scores, BLOCK * stride);
    float* result = room(scratch.result, TILE_ROWS * width);
    float* key_sums = zeros(scratch.grad_keys, key_rows * width);
    float* value_sums = zeros(scratch.grad_values, key_rows * value_width);
    const T* key_from = key + (sequence.start_k * pack.groups + group) * size;
    const T* value_from = value + (sequence.start_k * pack.groups + group) * value_size;
    pack_panels(key_from, pack.groups * size, keys, size, key_panels);
    pack_rows(key_from, pack.groups * size, keys, size, 1.0f, key_numbers, width);
    pack_panels(value_from, pack.groups * value_size, keys, value_size, value_panels);
    for (long head = group * heads; head < (group + 1) * heads; ++head) {
        double grad_sink = 0;
        for (long first = 0; first < sequence.length; first += BLOCK) {
            const long rows = std::min(BLOCK, sequence.length - first), padded = round_up(rows, TILE_ROWS);
            const long place = (sequence.start + first) * pack.heads + head;
            pack_rows(query + place * size, pack.heads * size, rows, size, pack.scale * LOG2_E, queries, width);
            pack_rows(grad + place * value_size, pack.heads * value_size, rows, value_size, 1.0f, grads, value_width);
            std::fill(grads + rows * value_width, grads + padded * value_width, 0.0f);  // padding adds nothing
            for (long top = 0; top < rows; top += TILE_ROWS) {
                const Tile tile(sequence, first + top, first + rows);
                float* tile_scores = scores + top * stride;
                float* tile_grads = grad_scores + top * stride;
                score(tile, queries + top * width, width, key_panels, size, tile_scores, stride);
                score(tile, grads + top * value_width, value_width, value_panels, value_size, tile_grads, stride);
                for (long row = 0; row < TILE_ROWS; ++row) {
                    const long index = tile.query(row);
                    float* powers = tile_scores + row * stride;
                    const Powers of = exponentiate(powers, tile, sequence.first_key(index), sequence.last_key(index),
                                                   pack.sink(head));
                    grad_sink -= of.sink / of.sum * differentiate(powers, tile_grads + row * stride, tile, of.sum);
                }
                multiply<false>(tile_grads + tile.low, stride, 1, key_numbers + tile.low * width, width,
                                tile.high - tile.low, result, width, width);
                for (long row = 0; row < tile.rows; ++row)
                    unpack_row(result + row * width, size, pack.scale,
                               grad_query + (place + (top + row) * pack.heads) * size);
            }
            // The tiles that see a key follow each other: later ones see later keys, or all of them all keys.
            long begin = 0, end = 0;
            const long low = Tile(sequence, first, first + rows).low, high = sequence.last_key(first + rows - 1);
            for (long column = low; column < high; column += TILE_ROWS) {
                while (Tile(sequence, first + begin, first + rows).high <= column) begin += TILE_ROWS;
                while (end < rows && Tile(sequence, first + end, first + rows).low <= column) end += TILE_ROWS;
                const long from = begin * stride + column;
                multiply<true>(scores + from, 1, stride, grads + begin * value_width, value_width, end - begin,
                               value_sums + column * value_width, value_width, value_width);
                multiply<true>(grad_scores + from, 1, stride, queries + begin * width, width, end - begin,
                               key_sums + column * width, width, width);
            }
        }
        grad_sinks[head] = grad_sink;
    }
    for (long index = 0; index < keys; ++index) {
        const long place = (sequence.start_k + index) * pack.groups + group;
        unpack_row(key_sums + index * width, size, 1 / LOG2_E, grad_key + place * size);  // as the queries have it
        unpack_row(value_sums + index * value_width, value_size, 1.0f, grad_value + place * value_size);
    }
}

template <typename Work>
void for_each_sequence(const Pack& pack, long threads, Work work) {
#pragma omp parallel num_threads(threads)
    {
        Scratch scratch;
#pragma omp for schedule(dynamic)
        for (long task = 0; task < pack.sequences * pack.groups; ++task)
            work(Sequence(pack, task / pack.groups), task % pack.groups, scratch);
    }
}

template <typename T>
void forward(const Pack* pack, const T* query, const T* key, const T* value, T* output, long threads) {
    for_each_sequence(*pack, threads, [=](const Sequence& sequence, long group, Scratch& scratch) {
        forward_sequence(*pack, sequence, group, query, key, value, output, scratch);
    });
}

template <typename T>
void backward(const Pack* pack, const T* grad, const T* query, const T* key, const T* value, T* grad_query,
              T* grad_key, T* grad_value, float* grad_sinks, long threads) {
    for_each_sequence(*pack, threads, [=](const Sequence& sequence, long group, Scratch& scratch) {
        backward_sequence(*pack, sequence, group, grad, query, key, value, grad_query, grad_key, grad_value,
                          grad_sinks + sequence.index * pack->heads, scratch);
    });
}

}  // namespace

extern "C" {

void forward_float32(const Pack* pack, const float* query, const float* key, const float* value, float* output,
                     long threads) {
    forward(pack, query, key, value, output, threads);
}

void forward_bfloat16(const Pack* pack, const Bfloat16* query, const Bfloat16* key, const Bfloat16* value,
                      Bfloat16* output, long threads) {
    forward(pack, query, key, value, output, threads);
}

void backward_float32(const Pack* pack, const float* grad, const float* query, const float* key, const float* value,
                      float* grad_query, float* grad_key, float* grad_value, float* grad_sinks, long threads) {
    backward(pack, grad, query, key, value, grad_query, grad_key, grad_value, grad_sinks, threads);
}

void backward_bfloat16(const Pack* pack, const Bfloat16* grad, const Bfloat16* query, const Bfloat16* key,
                       const Bfloat16* value, Bfloat16* grad_query, Bfloat16* grad_key, Bfloat16* grad_value,
                       float* grad_sinks, long threads) {
    backward(pack, grad, query, key, value, grad_query, grad_key, grad_value, grad_sinks, threads);
}
}
