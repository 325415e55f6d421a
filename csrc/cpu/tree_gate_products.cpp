// The matrix products of a tree gate, forward and backward, without those of branches that a token cannot reach. If a
// node's pre-activation is at least gamma / 2 in absolute value, the node is saturated: the token reaches only one of
// its children. Below its first `levels` levels, a tree is divided into branches (subtrees) of at most kColumns nodes
// and leaves. The weights of a branch are multiplied only for the tokens that reach its root. The nodes above the
// branches are left to moe_kernels/backends/native/tree_gate_products_cpu.py. K = trees, P = dim, the features.

#include "ops.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "moe/cpu/elements.h"
#include "moe/cpu/pages.h"
#include "moe/cpu/tiles.h"
#include "tree.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int64_t kColumns = 32;  // columns of a branch's buffers: enough for 15 nodes (four levels) and 16 leaves
constexpr int64_t kBlock = 256;   // tokens of a block in forward and to_x
constexpr int64_t kDepth = 256;   // tokens that to_weights multiplies at a time

// A tile of a result has kRows rows of two vectors: as many sums as a tile of moe/cpu/tiles.h.
constexpr int kRows = kTileRows * kTileVectors / 2;
template <class T>
constexpr int kWidth = 2 * kLanes<T>;  // columns of a packed panel

// Element (i, j) is at[i * row + j * column]. If `rows` is not null, rows[i] replaces i; likewise `columns` and j.
template <class T>
struct Matrix {
  T* at;
  int64_t row, column;
  const int32_t *rows = nullptr, *columns = nullptr;

  T* of_row(int64_t i) const { return at + (rows == nullptr ? i : rows[i]) * row; }
};

// Computes M rows from `first` on (fewer at the end) of c (rows, columns) = a b, or c += a b if `more`. b is packed as
// (depth, kWidth). `gathered`: a.columns is not null. Prefetches a if it is gathered, else `lines` (moe/cpu/tiles.h).
template <int M, bool gathered, class T>
void tile_of(const Matrix<const T>& a, const T* b, int64_t depth, const Matrix<T>& c, int64_t first, int64_t rows,
             int64_t columns, bool more, Prefetcher::Piece lines) {
  Vec<T> sum[M][2] = {};
  const T* at[M];
  const int64_t last = std::min(first + M, rows) - 1;
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) at[m] = a.of_row(std::min(first + m, last));  // rows past the end repeat the last one
  for (int64_t k = 0; k < depth; ++k, b += 2 * kLanes<T>, lines.from += lines.bytes) {
    const int64_t step = (gathered ? a.columns[k] : k) * a.column;
    __builtin_prefetch(gathered ? reinterpret_cast<const char*>(at[0] + step) + 256 : lines.from, 0, 2);
    const Vec<T> b0 = load(b), b1 = load(b + kLanes<T>);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const Vec<T> x = broadcast(at[m][step]);
      sum[m][0] += x * b0;
      sum[m][1] += x * b1;
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
    if (first + m <= last) put(c.of_row(first + m), sum[m], columns, more);
}

// c (rows, columns <= kWidth) = a b, or c += a b if `more`.
template <class T, bool gathered = false>
[[gnu::noinline]] void product(const Matrix<const T>& a, const T* b, int64_t depth, const Matrix<T>& c, int64_t rows,
                               int64_t columns, bool more, Prefetcher& prefetcher) {
  for (int64_t i = 0; i < rows; i += kRows) {
    const Prefetcher::Piece lines = prefetcher.take(depth, b);
    if (rows - i <= 4) tile_of<4, gathered>(a, b, depth, c, i, rows, columns, more, lines);
    else tile_of<kRows, gathered>(a, b, depth, c, i, rows, columns, more, lines);
  }
}

// Branch b of tree k has the number k << levels | b. The tokens that reach it, in ascending order, are
// token[offsets[number]] to token[offsets[number + 1] - 1].
struct Branches {
  int64_t trees, experts, levels;
  const int32_t *offsets, *token;

  int64_t count() const { return trees << levels; }
  int64_t tree(int64_t number) const { return number >> levels; }
  const int32_t* begin(int64_t number) const { return token + offsets[number]; }
  const int32_t* end(int64_t number) const { return token + offsets[number + 1]; }

  // The columns of a branch are its nodes and leaves, level by level. Calls visit(first column, number of columns,
  // index of the first node or leaf, whether they are leaves) for the nodes of a level, and for the leaves of a level.
  // The index of a leaf is its expert. Returns the number of columns.
  template <class Visit>
  int64_t each_run(int64_t number, Visit visit) const {
    const Leaves leaves(experts);
    int64_t column = 0, first = (int64_t(1) << levels) - 1 + number % (int64_t(1) << levels);
    for (int64_t width = 1; first < 2 * experts - 1; first = 2 * first + 1, width *= 2) {
      const int64_t last = std::min(first + width, 2 * experts - 1), inner = std::clamp(experts - 1, first, last);
      if (inner > first) visit(column, inner - first, first, false);
      if (last > inner) visit(column + inner - first, last - inner, leaves.expert(inner), true);
      column += last - first;
    }
    return column;
  }
};

// A tensor of the nodes, (.., K, E-1, dim), and one of the leaves, (.., K, E, dim). For logits and biases, dim is 1.
template <class T>
struct TreeTensors {
  T *split, *leaf;
  int64_t experts, dim;

  // The `dim` elements of node or leaf `index` of a tree. In tensors (tokens, K, ..), `tree` is token * K + k.
  T* at(int64_t tree, int64_t index, bool is_leaf) const {
    return is_leaf ? leaf + (tree * experts + index) * dim : split + (tree * (experts - 1) + index) * dim;
  }
};

template <class T>
struct Products {
  Branches branches;
  int64_t tokens, dim;
  TreeTensors<T> weight, logits;  // logits: pre-activations; in backward, their gradients
  T* packed;                      // packed weights of all branches, room() elements for each
  T* scratch;                     // scratch_stride elements for each thread
  int64_t scratch_stride;
  int threads;
  Elements<T> kind = elements_of<T>(sizeof(T) == 8 ? int(DType::float64) : int(DType::float32));

  static constexpr int64_t panel = kWidth<T>;
  int64_t room() const { return kColumns * ((dim + kColumns - 1) / kColumns * kColumns); }  // elements for a branch

  template <class Work>
  void share(int64_t count, Work work) const {
    std::atomic<int64_t> next{0};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; ++thread)
      for (int64_t i = next++; i < count; i = next++) work(i, scratch + thread * scratch_stride);
  }

  // Packs the weights w (columns, P) of every branch that some token reaches: panels (P, panel) of w^T if `transposed`,
  // to compute x w^T; else panels (columns, panel) of w, to multiply gradients by w.
  void pack_weights(bool transposed) const {
    share(branches.count(), [&](int64_t number, T* w) {
      if (branches.begin(number) == branches.end(number)) return;
      const int64_t columns =
          branches.each_run(number, [&](int64_t column, int64_t count, int64_t index, bool is_leaf) {
            const T* from = weight.at(branches.tree(number), index, is_leaf);
            std::copy(from, from + count * dim, w + column * dim);
          });
      const char* from = reinterpret_cast<char*>(w);
      T* to = packed + number * room();
      for (int64_t j = 0; transposed && j < columns; j += panel)
        pack<panel>(to + j * dim, kind, from, 1, dim, dim, j, columns);
      for (int64_t p = 0; !transposed && p < dim; p += panel)
        pack<panel>(to + p * kColumns, kind, from, dim, 1, columns, p, dim);
    });
  }

  // Calls work(number, token, rows, prefetcher) for each branch that some tokens of the block reach. These tokens are
  // token[0] to token[rows - 1].
  template <class Work>
  void each_branch(int64_t block, Work work) const {
    const auto first_from = [&](int64_t number, int64_t t) {
      return std::lower_bound(branches.begin(number), branches.end(number), t);
    };
    for (int64_t number = 0; number < branches.count(); ++number) {
      const int32_t* token = first_from(number, block * kBlock);
      const int64_t rows = first_from(number, (block + 1) * kBlock) - token;
      if (rows == 0) continue;
      const T* next = packed + (number + 1) % branches.count() * room();
      Prefetcher prefetcher{{{reinterpret_cast<const char*>(next), room() * int64_t(sizeof(T))}, {}},
                            panels_of(rows, kRows) * room() / panel,
                            false};
      work(number, token, rows, prefetcher);
    }
  }

  // Copies the logits of `rows` tokens in a branch to `to` (rows, kColumns). Returns the branch's number of columns.
  int64_t read(int64_t number, const int32_t* token, int64_t rows, T* to) const {
    return branches.each_run(number, [&](int64_t column, int64_t count, int64_t index, bool is_leaf) {
      for (int64_t r = 0; r < rows; ++r) {
        const T* from = logits.at(token[r] * branches.trees + branches.tree(number), index, is_leaf);
        each_element(count, [from, row = to + r * kColumns + column](int64_t c) { row[c] = from[c]; });
      }
    });
  }

  // A token's logits are x w^T + bias in the branches that it reaches, and 0 in others and in the nodes above branches.
  void forward(const T* x, int64_t stride, const TreeTensors<const T>& bias) const {
    pack_weights(true);
    share((tokens + kBlock - 1) / kBlock, [&](int64_t block, T* sums) {
      const int64_t first = block * kBlock * branches.trees,
                    last = std::min(tokens, (block + 1) * kBlock) * branches.trees;
      std::fill(logits.at(first, 0, false), logits.at(last, 0, false), T(0));
      std::fill(logits.at(first, 0, true), logits.at(last, 0, true), T(0));
      each_branch(block, [&](int64_t number, const int32_t* token, int64_t rows, Prefetcher& prefetcher) {
        const T* w = packed + number * room();
        const int64_t tree = branches.tree(number);
        const int64_t columns = branches.each_run(number, [](auto...) {});
        for (int64_t j = 0; j < columns; j += panel)
          product<T>({x, stride, 1, token}, w + j * dim, dim, {sums + j, kColumns, 1}, rows, panel, false, prefetcher);
        branches.each_run(number, [&](int64_t column, int64_t count, int64_t index, bool is_leaf) {
          const T* plus = bias.at(tree, index, is_leaf);
          for (int64_t r = 0; r < rows; ++r) {
            T* to = logits.at(token[r] * branches.trees + tree, index, is_leaf);
            each_element(count, [=, from = sums + r * kColumns + column](int64_t c) { to[c] = from[c] + plus[c]; });
          }
        });
      });
    });
  }

  // Adds to a token's row of dx (T, P) the gradients of its logits times the weights, in the branches that it reaches.
  void to_x(T* dx) const {
    pack_weights(false);
    share((tokens + kBlock - 1) / kBlock, [&](int64_t block, T* grads) {
      each_branch(block, [&](int64_t number, const int32_t* token, int64_t rows, Prefetcher& prefetcher) {
        const T* w = packed + number * room();
        const int64_t columns = read(number, token, rows, grads);
        for (int64_t p = 0; p < dim; p += panel)
          product<T>({grads, kColumns, 1}, w + p * kColumns, columns, {dx + p, dim, 1, token}, rows,
                     std::min(panel, dim - p), true, prefetcher);
      });
    });
  }

  void to_weights(const T* x, int64_t stride, const TreeTensors<T>& dweight) const {
    share(branches.count(), [&](int64_t number, T* sums) {
      T *grads = sums + dim * kColumns, *panels = grads + kDepth * kColumns;
      const int32_t *first = branches.begin(number), *end = branches.end(number);
      std::fill(grads, grads + kDepth * kColumns, T(0));  // columns that the branch lacks stay 0
      if (first == end) std::fill(sums, sums + dim * kColumns, T(0));
      Prefetcher none{{}, 1, false};
      for (const int32_t* token = first; token < end; token += kDepth) {
        const int64_t depth = std::min<int64_t>(kDepth, end - token);
        read(number, token, depth, grads);
        const Matrix<const T> a{x, 1, stride, nullptr, token};
        for (int64_t j = 0; j < kColumns; j += panel) {
          pack<panel>(panels, kind, reinterpret_cast<char*>(grads), kColumns, 1, depth, j, kColumns);
          product<T, true>(a, panels, depth, {sums + j, kColumns, 1}, dim, panel, token > first, none);
        }
      }
      branches.each_run(number, [&](int64_t column, int64_t count, int64_t index, bool is_leaf) {
        if ((is_leaf ? dweight.leaf : dweight.split) == nullptr) return;
        for (int64_t c = 0; c < count; ++c) {
          T* to = dweight.at(branches.tree(number), index + c, is_leaf);
          for (int64_t p = 0; p < dim; ++p) to[p] = sums[p * kColumns + column + c];
        }
      });
    });
  }
};

// The branches of a tree that a token reaches, one bit each. split: pre-activations of at least the first `levels`
// levels; half: gamma / 2.
template <class T>
uint64_t reached(const T* split, int64_t levels, T half) {
  uint64_t away = 0;  // branches that saturated nodes exclude
  for (int64_t level = 0, q = 0; level < levels; ++level) {
    const int64_t below = int64_t(1) << (levels - 1 - level);  // number of branches below each child of a node
    const uint64_t side = (uint64_t(1) << below) - 1;
    for (int64_t first = 0; first < int64_t(1) << levels; first += 2 * below, ++q) {
      away |= (side & -uint64_t(split[q] <= -half)) << first;
      away |= (side & -uint64_t(split[q] >= half)) << (first + below);
    }
  }
  return ~away & ((uint64_t(2) << ((int64_t(1) << levels) - 1)) - 1);
}

template <class T>
void reach(const T* split, int64_t stride_token, int64_t stride_tree, double gamma, int64_t tokens, int64_t trees,
           int64_t levels, uint64_t* bits, int32_t* offsets, int32_t* token, int threads) {
  const int64_t branches = int64_t(1) << levels;
  offsets[0] = 0;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t k = 0; k < trees; ++k) {
    int32_t* count = offsets + 1 + k * branches;
    std::fill(count, count + branches, 0);
    for (int64_t t = 0; t < tokens; ++t) {
      const T* here = split + t * stride_token + k * stride_tree;
      const uint64_t found = bits[k * tokens + t] = reached(here, levels, T(gamma / 2));
      for (uint64_t left = found; left != 0; left &= left - 1) ++count[__builtin_ctzll(left)];
    }
  }
  for (int64_t i = 0; i < trees * branches; ++i) offsets[i + 1] += offsets[i];
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t k = 0; k < trees; ++k) {
    int32_t next[64];
    std::copy(offsets + k * branches, offsets + (k + 1) * branches, next);
    for (int64_t t = 0; t < tokens; ++t)
      for (uint64_t left = bits[k * tokens + t]; left != 0; left &= left - 1)
        token[next[__builtin_ctzll(left)]++] = int32_t(t);
  }
}

#define MOE_PRODUCTS(T)                                                                                       \
  Products<T> {                                                                                               \
    {trees, experts, levels, offsets, token}, tokens, dim,                                                            \
        {static_cast<T*>(split_weight), static_cast<T*>(leaf_weight), experts, dim},                          \
        {static_cast<T*>(split_logits), static_cast<T*>(leaf_logits), experts, 1}, static_cast<T*>(packed), \
        static_cast<T*>(scratch), scratch_stride, threads                                                     \
  }

}  // namespace

void tree_reach(int dtype, const void* split_logits, int64_t stride_token, int64_t stride_tree, double gamma,
                int64_t tokens, int64_t trees, int64_t levels, void* bits, int32_t* offsets, int32_t* token,
                int threads) {
  with_wide(dtype, [&](auto zero) {
    reach(static_cast<const decltype(zero)*>(split_logits), stride_token, stride_tree, gamma, tokens, trees, levels,
          static_cast<uint64_t*>(bits), offsets, token, threads);
  });
}

void expect_writes(void* output, int64_t bytes, int) { expect_pages(output, bytes); }

void tree_products_fwd(MOE_TREE_PRODUCTS_ARGS, const void* split_bias, const void* leaf_bias, int threads) {
  with_wide(dtype, [&](auto zero) {
    using T = decltype(zero);
    const TreeTensors<const T> bias{static_cast<const T*>(split_bias), static_cast<const T*>(leaf_bias), experts, 1};
    MOE_PRODUCTS(T).forward(static_cast<const T*>(x), x_stride, bias);
  });
}

void tree_products_bwd(MOE_TREE_PRODUCTS_ARGS, void* dx, void* dsplit_weight, void* dleaf_weight, int threads) {
  with_wide(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto products = MOE_PRODUCTS(T);
    if (dx != nullptr) products.to_x(static_cast<T*>(dx));
    if (dsplit_weight != nullptr || dleaf_weight != nullptr)
      products.to_weights(static_cast<const T*>(x), x_stride,
                          {static_cast<T*>(dsplit_weight), static_cast<T*>(dleaf_weight), experts, dim});
  });
}

#undef MOE_PRODUCTS

}  // namespace MOE_ISA
}  // namespace moe
