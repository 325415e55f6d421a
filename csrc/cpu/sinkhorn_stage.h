// The group of matrices that a thread of sinkhorn.cpp computes at a time, and the form of the iteration for each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "moe/cpu/formats.h"
#include "moe/cpu/lanes.h"

namespace moe {
namespace MOE_ISA {
namespace {

// The scaled form in float, or in double, needs a range (maximum - minimum) of scores / tau below this in each row.
// After an iteration, u_i v_j (sinkhorn_scaled.h) is at most exp(range), which is far from overflow.
constexpr double kFloatRange = 60, kDoubleRange = 300;

// The forms of sinkhorn.cpp, from cheap to expensive. broken: a score is NaN or +inf, so all results are NaN; or the
// lane has no matrix.
enum class Form { scaled_float, scaled_double, logarithmic, broken };

// The form of each matrix of a group. Bit f of `found` is set if a matrix has form f.
template <int64_t group>
struct Forms {
  Form each[group];
  unsigned found = 0;

  bool has(Form form) const { return found >> int(form) & 1; }
};

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Divides scratch memory into arrays, each at a multiple of 64 bytes from the start of the memory.
class Arena {
 public:
  explicit Arena(char* room) : room_(room) {}
  Arena after(int64_t bytes) const { return Arena(room_ + bytes); }
  template <class T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(room_);
    room_ += round_up(count * int64_t(sizeof(T)), 64);
    return taken;
  }

 private:
  char* room_;
};

// The sum of all lanes of v (row_max: the maximum), in every lane. If packed, lanes hold different matrices: returns v.
template <bool packed, class T>
Vec<T> row_sum(Vec<T> v) {
  return packed ? v : across<T>(v, [](Vec<T> a, Vec<T> b) { return a + b; });
}

template <bool packed, class T>
Vec<T> row_max(Vec<T> v) {
  return packed ? v : across<T>(v, [](Vec<T> a, Vec<T> b) { return max(a, b); });
}

// The matrices of a group in the type Wide: scores, which results overwrite, or gradients. Packed: a group has one
// matrix for each lane of two vectors of Wide. Element (i, j) is `group` numbers, one for each matrix. Not packed: a
// group is one matrix, with rows padded to whole vectors.
template <bool packed, class Wide>
struct Stage {
  static constexpr int64_t vectors = packed ? 2 : 1, group = packed ? vectors * kLanes<Wide> : 1;

  int64_t n, row;  // matrices are n x n; row: numbers in a row of `data`
  Wide* data;

  Stage(int64_t n, Arena* arena)
      : n(n), row(packed ? n * group : round_up(n, kLanes<Wide>)), data(arena->take<Wide>(n * row)) {}

  // Address of element (i, j) of the matrices of a Part if packed, else of the j-th vector of row i.
  template <class T>
  Wide* block(int64_t i, int64_t j, int64_t part) const {
    return data + i * row + j * (packed ? group : kLanes<T>) + part * kLanes<T>;
  }

  // Reads `count` matrices; if count < group, the others become zeros. Padding repeats the first element of its row.
  template <class F>
  void read(const typename F::Key* from, int64_t stride_batch, int64_t stride_row, int64_t count) const {
    const bool whole = packed && stride_row == n;  // then a matrix is contiguous
    const int64_t rows = whole ? 1 : n, columns = whole ? n * n : n;
    if (count < group) std::fill(data, data + n * row, Wide(0));
    if constexpr (kTransposes<F>) {
      if (whole && count == group) return read_transposed(from, stride_batch);
    }
    for (int64_t l = 0; l < count; ++l)
      for (int64_t i = 0; i < rows; ++i) {
        const typename F::Key* in = from + l * stride_batch + i * stride_row;
        for (int64_t j = 0; j < columns; ++j) data[i * row + j * group + l] = F::widen(in[j]);
        if (!packed) std::fill(data + i * row + n, data + (i + 1) * row, data[i * row]);
      }
  }

  template <class F>
  void write(typename F::Key* to, int64_t count, const Forms<group>& forms) const {
    const int64_t rows = packed ? 1 : n, columns = packed ? n * n : n;
    if constexpr (kTransposes<F>) {
      if (count == group && !forms.has(Form::broken)) return write_transposed(to);
    }
    for (int64_t l = 0; l < count; ++l)
      for (int64_t i = 0; i < rows; ++i, to += columns)
        if (forms.each[l] == Form::broken) {
          std::fill(to, to + columns, F::narrow(std::numeric_limits<Wide>::quiet_NaN()));
        } else {
          for (int64_t j = 0; j < columns; ++j) to[j] = F::narrow(data[i * row + j * group + l]);
        }
  }

  // Whether full groups can be read and written in squares of kLanes<Wide> x kLanes<Wide> elements, transposed in
  // registers.
  template <class F>
  static constexpr bool kTransposes = packed && sizeof(typename F::Key) == sizeof(Wide);

  template <class Key>
  void read_transposed(const Key* from, int64_t stride_batch) const {
    constexpr int w = kLanes<Wide>;
    int64_t e = 0;
    for (; e + w <= n * n; e += w)
      for (int64_t first = 0; first < group; first += w) {
        Vec<Wide> block[w];
        for (int l = 0; l < w; ++l) block[l] = (Vec<Wide>)load(from + (first + l) * stride_batch + e);
        transpose(block);
        for (int l = 0; l < w; ++l) store(data + (e + l) * group + first, block[l]);
      }
    for (; e < n * n; ++e)
      for (int64_t l = 0; l < group; ++l) std::memcpy(data + e * group + l, from + l * stride_batch + e, sizeof(Wide));
  }

  template <class Key>
  void write_transposed(Key* to) const {
    constexpr int w = kLanes<Wide>;
    int64_t e = 0;
    for (; e + w <= n * n; e += w)
      for (int64_t first = 0; first < group; first += w) {
        Vec<Wide> block[w];
        for (int l = 0; l < w; ++l) block[l] = load(data + (e + l) * group + first);
        transpose(block);
        for (int l = 0; l < w; ++l) store(to + (first + l) * n * n + e, (Vec<Key>)block[l]);
      }
    for (; e < n * n; ++e)
      for (int64_t l = 0; l < group; ++l) std::memcpy(to + l * n * n + e, data + e * group + l, sizeof(Wide));
  }

  // The form of each of `count` matrices: the cheapest that Wide, tau and all rows allow. may_scale: whether the scaled
  // forms are allowed. Padding must be within the range of its row.
  Forms<group> classify(double tau, bool may_scale, int64_t count) const {
    using V = Vec<Wide>;
    constexpr Wide inf = std::numeric_limits<Wide>::infinity();
    constexpr int64_t w = kLanes<Wide>;
    Forms<group> forms;
    for (int64_t first = 0; first < vectors * w; first += w) {
      V range{}, lowest = broadcast(inf), kind{};
      for (int64_t i = 0; i < n; ++i) {
        V high = broadcast(-inf), low = broadcast(inf);
        for (int64_t j = first; j < row; j += vectors * w) {
          const V x = load(data + i * row + j);
          high = max(high, x), low = -max(-low, -x);
          kind = x < inf ? kind : broadcast(Wide(Form::broken));  // NaN or +inf
        }
        lowest = -max(-lowest, -low);
        range = max(range, row_max<packed, Wide>(high) + row_max<packed, Wide>(-low));
      }
      // Raises `kind` to at least `least` in the lanes where `where` holds. kind == kind is true in all lanes.
      const auto needs = [&](auto where, Form least) { kind = where ? max(kind, broadcast(Wide(least))) : kind; };
      // Scores in double need scaling in double; ExpOfDifference (lanes.h) needs tau between 1e-30 and 1e30.
      if (sizeof(Wide) == 8 || !(tau > 1e-30 && tau < 1e30)) needs(kind == kind, Form::scaled_double);
      needs(!(range < Wide(kFloatRange * tau)), Form::scaled_double);
      needs(!(range < Wide(kDoubleRange * tau)), Form::logarithmic);
      needs(lowest == -inf, Form::logarithmic);  // `range` may miss a row in which all scores are -inf
      if (!may_scale) needs(kind == kind, Form::logarithmic);
      kind = row_max<packed, Wide>(kind);
      for (int64_t l = 0; l < group / vectors; ++l) forms.each[first + l] = Form(int(kind[l]));
    }
    std::fill(forms.each + count, forms.each + group, Form::broken);
    for (int64_t l = 0; l < count; ++l) forms.found |= 1u << int(forms.each[l]);
    return forms;
  }

  void pad(Wide value) const {
    for (int64_t i = 0; !packed && i < n; ++i) std::fill(data + i * row + n, data + (i + 1) * row, value);
  }
};

// One value for each row: if packed, a vector with one value for each matrix of a Part, else a number.
template <bool packed, class T>
struct RowValues {
  T* data;

  static RowValues take(int64_t n, Arena* arena) { return {arena->take<T>(packed ? n * kLanes<T> : n)}; }
  Vec<T> operator[](int64_t i) const { return packed ? load(data + i * kLanes<T>) : broadcast(data[i]); }
  void set(int64_t i, Vec<T> v) const {
    if constexpr (packed) {
      store(data + i * kLanes<T>, v);
    } else {
      data[i] = v[0];
    }
  }
};

// Matrices of a group that are computed together, in T: kLanes<T> of a packed Stage, the only one of an unpacked Stage.
template <bool packed, class Wide, class T>
class Part {
 public:
  static constexpr int64_t parts = packed ? Stage<packed, Wide>::group / kLanes<T> : 1;

  const Stage<packed, Wide>& scores;
  int64_t part, n, blocks;  // blocks: vectors in a row; n if packed
  bool wanted = false;      // whether a matrix has form `one` or `other`

  Part(const Stage<packed, Wide>& scores, int64_t part, const Forms<Stage<packed, Wide>::group>& forms, Form one,
       Form other)
      : scores(scores), part(part), n(scores.n), blocks(packed ? scores.n : scores.row / kLanes<T>) {
    if (!forms.has(one) && !forms.has(other)) return;
    for (int l = 0; l < (packed ? kLanes<T> : 1); ++l) {
      const Form each = forms.each[part * kLanes<T> + l];
      mask_[l] = each == one || each == other ? -1 : 0;
      wanted |= mask_[l] != 0;
    }
  }

  int64_t width() const { return blocks * kLanes<T>; }
  Vec<double> score(int64_t i, int64_t j) const { return at(scores, i, j); }
  Vec<double> at(const Stage<packed, Wide>& stage, int64_t i, int64_t j) const {
    return load_as<double>(stage.template block<double>(i, j, part));
  }

  // Writes results over their scores; if packed, only for matrices of form `one` or `other`.
  void put(int64_t i, int64_t j, Vec<T> value) const {
    Wide* to = scores.template block<T>(i, j, part);
    if constexpr (packed) {
      Values old;
      std::memcpy(&old, to, sizeof old);
      const Values chosen = mask_ ? __builtin_convertvector(value, Values) : old;
      std::memcpy(to, &chosen, sizeof chosen);
    } else {
      store_as<T>(to, value);
    }
  }

 private:
  static constexpr int kBytes = kLanes<T> * int(sizeof(Wide));
  using Values = typename VecOf<Wide, kBytes>::type;
  typename VecOf<std::conditional_t<sizeof(Wide) == 8, int64_t, int32_t>, kBytes>::type mask_{};
};

}  // namespace
}  // namespace MOE_ISA
}  // namespace moe
