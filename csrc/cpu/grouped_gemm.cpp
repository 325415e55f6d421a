// The grouped GEMM on the CPU (definition: python_ref/grouped_gemm.py): products of small experts, and what follows a
// product, done row by row while it is in the cache. Products of large experts come from torch's library, ready, as
// `product`; then only what follows is left.

#include "ops.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>

#include "moe/activations.h"
#include "moe/formats.h"
#include "moe/pages.h"
#include "moe/tiles.h"

namespace moe {
namespace MOE_ISA {
namespace {

constexpr int64_t kSpan = 192;   // rows that share a packing of their expert's weight, which costs as much as 10 to 20
constexpr int64_t kDepth = 256;  // rows that the weight gradient sums at a time: a panel of them is 32 KB
constexpr int64_t kBlock = 96;   // rows of dW that share it

// Rows of experts, and the spans of them that threads take one after the other.
struct Groups {
  const int32_t* offsets;
  int64_t num_experts;

  int64_t first(int64_t e) const { return offsets[e]; }
  int64_t rows(int64_t e) const { return offsets[e + 1] - offsets[e]; }
  int64_t used() const { return offsets[num_experts]; }

  // Calls work(thread, expert, first row, rows) for every span of at most `span` rows of one expert.
  template <class Work>
  void each_span(int64_t span, int threads, Work work) const {
    const auto spans_of = [&](int64_t e) { return (rows(e) + span - 1) / span; };
    std::atomic<int64_t> next{0};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; ++thread) {
      int64_t e = 0, before = 0;  // spans of the experts before e
      for (int64_t i = next++;; i = next++) {
        while (e < num_experts && i >= before + spans_of(e)) before += spans_of(e++);
        if (e == num_experts) break;
        const int64_t row = (i - before) * span;
        work(thread, e, first(e) + row, std::min(span, rows(e) - row));
      }
    }
  }
};

// x (rows, dim), read through `token` where that is not null: -1 reads zeros.
template <class F>
struct Rows {
  const typename F::Key* x;
  int64_t stride;
  const int32_t* token;

  const typename F::Key* at(int64_t row) const {
    if (token == nullptr) return x + row * stride;
    return token[row] < 0 ? nullptr : x + token[row] * stride;
  }
  template <int64_t usual = 0>
  void copy(typename F::Wide* to, int64_t row, int64_t first, int64_t count) const {
    const auto* from = at(row);
    if (from == nullptr) std::fill(to, to + count, typename F::Wide(0));
    else widen_row<F, usual>(to, from + first, count);
  }
};

// What a product of rows needs: sums (R, dout) are x W_e, or stand ready in `product` of `product_dtype`.
template <class F>
struct Product {
  using Key = typename F::Key;
  using Wide = typename F::Wide;

  Rows<F> x;
  const Key* weight;
  int64_t stride_e, stride_k, stride_j;
  const void* product;
  int product_dtype;
  Groups groups;
  int64_t din, dout;
  Wide* scratch;  // of every thread: sums of a span, a panel, rows of a span; or the sums of a row that stands ready
  int64_t scratch_stride;

  // Calls finish(expert, row, sums of dout columns), which may write over the sums. They stand in `place` (R, dout) if that
  // is not null.
  template <class Finish>
  void run(int threads, Wide* place, Finish finish) const {
    groups.each_span(kSpan, threads, [&](int thread, int64_t e, int64_t first, int64_t count) {
      Wide* own = scratch + thread * scratch_stride;
      Wide* sums = place ? place + first * dout : own;
      if (product == nullptr) multiply(e, first, count, sums, own + kSpan * dout);
      for (int64_t r = 0; r < count; ++r) {
        Wide* row_sums = place || !product ? sums + r * dout : sums;
        if (product) ready(first + r, row_sums);
        finish(e, first + r, row_sums);
      }
    });
  }

  void ready(int64_t row, Wide* sums) const {
    with_format(product_dtype, [&](auto format) {
      using From = decltype(format);
      if constexpr (std::is_same_v<typename From::Wide, Wide>)
        widen_row<From>(sums, static_cast<const typename From::Key*>(product) + row * dout, dout);
    });
  }

  // Not inline: what finishes a row comes in 4 formats and 7 activations.
  [[gnu::noinline]] void multiply(int64_t e, int64_t first, int64_t count, Wide* sums, Wide* panel) const {
    Wide* rows = panel + kPanel<Wide> * din;
    const Wide* a = rows;
    int64_t a_row = din;
    if (sizeof(Key) == sizeof(Wide) && x.token == nullptr) {
      a = reinterpret_cast<const Wide*>(x.at(first));
      a_row = x.stride;
    } else {
      for (int64_t r = 0; r < count; ++r) x.copy(rows + r * din, first + r, 0, din);
    }
    for (int64_t j = 0; j < dout; j += kPanel<Wide>) {
      pack<F>(panel, weight + e * stride_e, stride_k, stride_j, din, j, dout);
      panel_product(a, a_row, int64_t(1), panel, din, sums + j, dout, count, std::min<int64_t>(kPanel<Wide>, dout - j),
                    false);
    }
  }
};

// Zeros from row `used` on.
template <class Key>
void clear(Key* out, int64_t used, int64_t rows, int64_t columns) {
  if (out != nullptr && columns > 0 && rows > used)
    std::memset(out + used * columns, 0, size_t((rows - used) * columns) * sizeof(Key));
}

template <class F>
void forward(const Product<F>& sums, const typename F::Key* bias, int activation, typename F::Key* out,
             typename F::Key* pre, int64_t rows, int threads) {
  using Wide = typename F::Wide;
  with_activation(activation, [&](auto constant) {
    constexpr Activation act = decltype(constant)::value;
    const int64_t dout = sums.dout, width = is_gated(act) ? dout / 2 : dout;
    expect_pages(out, rows * width * int64_t(sizeof(*out)));
    if (pre) expect_pages(pre, rows * dout * int64_t(sizeof(*pre)));
    // Where the sums are the result, but for a bias, they are made in its place.
    constexpr bool plain = act == Activation::none && sizeof(typename F::Key) == sizeof(Wide);
    Wide* place = plain && pre == nullptr ? reinterpret_cast<Wide*>(out) : nullptr;
    sums.run(threads, place, [&](int64_t e, int64_t row, Wide* p) {
      if (bias) {
        const auto* b = bias + e * dout;
#pragma omp simd
        for (int64_t j = 0; j < dout; ++j) p[j] += F::widen(b[j]);
      }
      if (place) return;
      if (pre) {
#pragma omp simd
        for (int64_t j = 0; j < dout; ++j) pre[row * dout + j] = F::narrow(p[j]);
      }
      auto* to = out + row * width;
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) {
        const Wide y = value_of<act>(p[j]);
        to[j] = F::narrow(is_gated(act) ? y * p[j + width] : y);
      }
    });
    clear(out, sums.groups.used(), rows, width);
    clear(pre, sums.groups.used(), rows, dout);
  });
}

// dW_e = x_e^T grad_e, kBlock rows of dW at a time, and dbias_e, the column sums of grad_e, with the first of them.
template <class F>
struct WeightGradient {
  using Key = typename F::Key;
  using Wide = typename F::Wide;

  Rows<F> x, grad;
  Groups groups;
  Key *dweight, *dbias;
  int64_t din, dout;
  Wide* scratch;  // of every thread: a block of dW, kDepth rows of that block of x, a panel of as many rows of grad
  int64_t scratch_stride;

  void run(int threads) const {
    const int64_t blocks = std::max<int64_t>(1, (din + kBlock - 1) / kBlock);
    expect_pages(dweight, groups.num_experts * din * dout * int64_t(sizeof(Key)));
    std::atomic<int64_t> next{0};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; ++thread) {
      Wide *own = scratch + thread * scratch_stride, *more = own + kBlock * dout;
      for (int64_t i = next++; i < groups.num_experts * blocks; i = next++) {
        const int64_t e = i / blocks, start = i % blocks * kBlock, count = std::min(kBlock, din - start);
        Key* to = dweight + (e * din + start) * dout;
        if constexpr (sizeof(Key) == sizeof(Wide)) {
          multiply(e, start, count, reinterpret_cast<Wide*>(to), more);
        } else {
          multiply(e, start, count, own, more);
          for (int64_t j = 0; j < count * dout; ++j) to[j] = F::narrow(own[j]);
        }
        if (dbias != nullptr && start == 0) column_sums(e, own);
      }
    }
  }

  void multiply(int64_t e, int64_t start, int64_t count, Wide* sums, Wide* block) const {
    Wide* panel = block + kDepth * kBlock;
    const int64_t rows = groups.rows(e);
    if (rows == 0) std::fill(sums, sums + count * dout, Wide(0));
    for (int64_t k = 0; k < rows && count > 0; k += kDepth) {
      const int64_t depth = std::min(kDepth, rows - k), row = groups.first(e) + k;
      for (int64_t r = 0; r < depth; ++r) x.template copy<kBlock>(block + r * kBlock, row + r, start, count);
      for (int64_t j = 0; j < dout; j += kPanel<Wide>) {
        const int64_t columns = std::min<int64_t>(kPanel<Wide>, dout - j);
        for (int64_t r = 0; r < depth; ++r) {
          Wide* to = panel + r * kPanel<Wide>;
          grad.template copy<kPanel<Wide>>(to, row + r, j, columns);
          std::fill(to + columns, to + kPanel<Wide>, Wide(0));
        }
        panel_product(block, int64_t(1), kBlock, panel, depth, sums + j, dout, count, columns, k > 0);
      }
    }
  }

  void column_sums(int64_t e, Wide* sums) const {
    std::fill(sums, sums + dout, Wide(0));
    for (int64_t row = groups.first(e); row < groups.first(e + 1); ++row) {
      const Key* from = grad.at(row);
      if (from == nullptr) continue;
#pragma omp simd
      for (int64_t j = 0; j < dout; ++j) sums[j] += F::widen(from[j]);
    }
    Key* to = dbias + e * dout;
#pragma omp simd
    for (int64_t j = 0; j < dout; ++j) to[j] = F::narrow(sums[j]);
  }
};

// dpre = grad act'(pre) of one row of `width` results; pre and dpre have both halves where the activation is gated.
template <class F, Activation act, class Grad>
void row_backward(Grad grad, const typename F::Key* pre, typename F::Key* dpre, int64_t width) {
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) {
    const auto y = sloped<act>(F::widen(pre[j]));
    if constexpr (is_gated(act)) {
      dpre[j] = F::narrow(grad(j) * y.slope * F::widen(pre[j + width]));
      dpre[j + width] = F::narrow(grad(j) * y.value);
    } else {
      dpre[j] = F::narrow(grad(j) * y.slope);
    }
  }
}

template <class F>
void hidden_backward(const Product<F>& sums, const typename F::Wide* row_weight, const typename F::Key* pre,
                     int activation, typename F::Key* dpre, typename F::Key* weighted, typename F::Wide* drow_weight,
                     int64_t rows, int threads) {
  using Wide = typename F::Wide;
  with_activation(activation, [&](auto constant) {
    constexpr Activation act = decltype(constant)::value;
    const int64_t hidden = sums.dout, width = is_gated(act) ? 2 * hidden : hidden;
    sums.run(threads, nullptr, [&](int64_t, int64_t row, const Wide* a) {
      const auto* p = pre + row * width;
      auto* to = weighted + row * hidden;
      const Wide w = row_weight[row];
      Wide dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t j = 0; j < hidden; ++j) {
        Wide h = value_of<act>(F::widen(p[j]));
        if constexpr (is_gated(act)) h *= F::widen(p[j + hidden]);
        dot += h * a[j];
        to[j] = F::narrow(w * h);
      }
      drow_weight[row] = dot;
      row_backward<F, act>([&](int64_t j) { return w * a[j]; }, p, dpre + row * width, hidden);
    });
    clear(dpre, sums.groups.used(), rows, width);
    clear(weighted, sums.groups.used(), rows, hidden);
    clear(drow_weight, sums.groups.used(), rows, 1);
  });
}

template <class F>
void norms(const Product<F>& sums, const typename F::Key* bias, typename F::Wide* out, int64_t rows, int threads) {
  using Wide = typename F::Wide;
  sums.run(threads, nullptr, [&](int64_t e, int64_t row, const Wide* y) {
    const auto* b = bias == nullptr ? nullptr : bias + e * sums.dout;
    Wide sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < sums.dout; ++j) {
      const Wide shifted = b == nullptr ? y[j] : y[j] + F::widen(b[j]);
      sum += shifted * shifted;
    }
    out[row] = sum;
  });
  clear(out, sums.groups.used(), rows, 1);
}

// The arguments that launchers of products share, in the order of ops.h.
#define MOE_PRODUCT                                                                                               \
  {                                                                                                               \
    {static_cast<const Key*>(x), x_stride, row_token}, static_cast<const Key*>(weight), stride_e, stride_k, stride_j, \
        product, product_dtype, {expert_offsets, num_experts}, din, dout, static_cast<Wide*>(scratch), scratch_stride \
  }

}  // namespace

void grouped_gemm_fwd(MOE_PRODUCT_ARGS, const void* bias, int activation, void* out, void* pre, int64_t rows,
                      int threads) {
  with_format(dtype, [&](auto format) {
    using F = decltype(format);
    using Key = typename F::Key;
    using Wide = typename F::Wide;
    forward<F>(MOE_PRODUCT, static_cast<const Key*>(bias), activation, static_cast<Key*>(out), static_cast<Key*>(pre),
               rows, threads);
  });
}

void grouped_gemm_bwd_weight(int dtype, const void* x, int64_t x_stride, const int32_t* x_token, const void* grad,
                             int64_t grad_stride, const int32_t* grad_token, const int32_t* expert_offsets,
                             int64_t num_experts, void* dweight, void* dbias, void* scratch, int64_t scratch_stride,
                             int64_t din, int64_t dout, int threads) {
  with_format(dtype, [&](auto format) {
    using F = decltype(format);
    using Key = typename F::Key;
    using Wide = typename F::Wide;
    const WeightGradient<F> work{{static_cast<const Key*>(x), x_stride, x_token},
                                 {static_cast<const Key*>(grad), grad_stride, grad_token},
                                 {expert_offsets, num_experts},
                                 static_cast<Key*>(dweight),
                                 static_cast<Key*>(dbias),
                                 din,
                                 dout,
                                 static_cast<Wide*>(scratch),
                                 scratch_stride};
    work.run(threads);
  });
}

void activation_bwd(int dtype, const void* grad, int64_t grad_stride, const void* pre, int activation, void* dpre,
                    int64_t rows, int64_t width, int threads) {
  with_format(dtype, [&](auto format) {
    using F = decltype(format);
    using Key = typename F::Key;
    with_activation(activation, [&](auto constant) {
      constexpr Activation act = decltype(constant)::value;
      const int64_t columns = is_gated(act) ? 2 * width : width;
#pragma omp parallel for num_threads(threads) schedule(static)
      for (int64_t r = 0; r < rows; ++r) {
        const Key* from = static_cast<const Key*>(grad) + r * grad_stride;
        row_backward<F, act>([&](int64_t j) { return F::widen(from[j]); }, static_cast<const Key*>(pre) + r * columns,
                             static_cast<Key*>(dpre) + r * columns, width);
      }
    });
  });
}

void expert_mlp_bwd_hidden(MOE_PRODUCT_ARGS, const void* row_weight, const void* pre, int activation, void* dpre,
                           void* weighted, void* drow_weight, int64_t rows, int threads) {
  with_format(dtype, [&](auto format) {
    using F = decltype(format);
    using Key = typename F::Key;
    using Wide = typename F::Wide;
    hidden_backward<F>(MOE_PRODUCT, static_cast<const Wide*>(row_weight), static_cast<const Key*>(pre), activation,
                       static_cast<Key*>(dpre), static_cast<Key*>(weighted), static_cast<Wide*>(drow_weight), rows,
                       threads);
  });
}

void grouped_gemm_norms(MOE_PRODUCT_ARGS, const void* bias, void* out, int64_t rows, int threads) {
  with_format(dtype, [&](auto format) {
    using F = decltype(format);
    using Key = typename F::Key;
    using Wide = typename F::Wide;
    norms<F>(MOE_PRODUCT, static_cast<const Key*>(bias), static_cast<Wide*>(out), rows, threads);
  });
}

#undef MOE_PRODUCT

}  // namespace MOE_ISA
}  // namespace moe
