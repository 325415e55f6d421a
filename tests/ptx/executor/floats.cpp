// Floating-point arithmetic. It rounds to nearest even, except for .approx, div.full and fma.rm.
#include <tuple>

#include "approximate.h"
#include "elementwise.h"

thread_local u64 approximation_seed = 0;

namespace {

template <class T>
bool less_or_greater(T x, T y) {
  return x < y || x > y;
}

// Comparisons; V converts a register of type T to a number.
template <class T, class V>
void comparisons(Table& t, const std::string& kind, V) {
  compare<T>(t, "setp.eq." + kind, [](T x, T y) { return V{}(x) == V{}(y); });
  compare<T>(t, "setp.ne." + kind, [](T x, T y) { return less_or_greater(V{}(x), V{}(y)); });
  compare<T>(t, "setp.lt." + kind, [](T x, T y) { return V{}(x) < V{}(y); });
  compare<T>(t, "setp.le." + kind, [](T x, T y) { return V{}(x) <= V{}(y); });
  compare<T>(t, "setp.gt." + kind, [](T x, T y) { return V{}(x) > V{}(y); });
  compare<T>(t, "setp.ge." + kind, [](T x, T y) { return V{}(x) >= V{}(y); });
  compare<T>(t, "setp.equ." + kind, [](T x, T y) { return !less_or_greater(V{}(x), V{}(y)); });
  compare<T>(t, "setp.neu." + kind, [](T x, T y) { return !(V{}(x) == V{}(y)); });
  compare<T>(t, "setp.ltu." + kind, [](T x, T y) { return !(V{}(x) >= V{}(y)); });
  compare<T>(t, "setp.leu." + kind, [](T x, T y) { return !(V{}(x) > V{}(y)); });
  compare<T>(t, "setp.gtu." + kind, [](T x, T y) { return !(V{}(x) <= V{}(y)); });
  compare<T>(t, "setp.geu." + kind, [](T x, T y) { return !(V{}(x) < V{}(y)); });
  compare<T>(t, "setp.nan." + kind, [](T x, T y) { return V{}(x) != V{}(x) || V{}(y) != V{}(y); });
  compare<T>(t, "setp.num." + kind, [](T x, T y) { return V{}(x) == V{}(x) && V{}(y) == V{}(y); });
}

template <class T>
void arithmetic(Table& t, const std::string& kind) {
  binary<T, T, T>(t, "add." + kind, [](T x, T y) { return one_nan(x + y); });
  binary<T, T, T>(t, "sub." + kind, [](T x, T y) { return one_nan(x - y); });
  binary<T, T, T>(t, "mul." + kind, [](T x, T y) { return one_nan(x * y); });
  binary<T, T, T>(t, "div." + kind, [](T x, T y) { return one_nan(x / y); });
  ternary<T, T, T, T>(t, "fma." + kind, [](T x, T y, T z) { return one_nan(std::fma(x, y, z)); });
  unary<T, T>(t, "neg." + kind, [](T x) { return -x; });
  unary<T, T>(t, "abs." + kind, [](T x) { return std::fabs(x); });
  unary<T, T>(t, "sqrt." + kind, [](T x) { return std::sqrt(x); });
  unary<T, T>(t, "rcp." + kind, [](T x) { return 1 / x; });
  binary<T, T, T>(t, "min." + kind, [](T x, T y) { return least(x, y); });
  binary<T, T, T>(t, "max." + kind, [](T x, T y) { return greatest(x, y); });
  binary<T, T, T>(t, "min.NaN." + kind, [](T x, T y) { return or_nan(x, y, least(x, y)); });
  binary<T, T, T>(t, "max.NaN." + kind, [](T x, T y) { return or_nan(x, y, greatest(x, y)); });
  binary<T, T, T>(t, "copysign." + kind, [](T x, T y) { return std::copysign(y, x); });
  comparisons<T>(t, kind, [](T x) { return x; });
}

// For 16-bit add, sub and mul, rounding to f32 and then to 16 bits gives the same as one rounding.
template <class Value, class Round>
struct Halves {
  static u16 add(u16 x, u16 y) { return Round{}(Value{}(x) + Value{}(y)); }
  static u16 sub(u16 x, u16 y) { return Round{}(Value{}(x) - Value{}(y)); }
  static u16 mul(u16 x, u16 y) { return Round{}(Value{}(x) * Value{}(y)); }
  static u16 fma(u16 x, u16 y, u16 z) {
    // `once` is rounded to odd, so that the rounding to 16 bits is correct. With bf16 the result can be wrong in the
    // last bit if the exponents are so far apart that `exact` itself is rounded.
    const f64 product = f64(Value{}(x)) * Value{}(y), exact = product + Value{}(z);
    f32 once = static_cast<f32>(exact);
    if (std::isfinite(once) && f64(once) != exact && !(bits<u32>(once) & 1)) {
      once = std::nextafter(once, f64(once) < exact ? INFINITY : -INFINITY);
    }
    return Round{}(once);
  }
};

// Applies `each` to the lower halves of x, and to the upper halves.
template <class F, class... A>
u32 packed(F each, A... x) {
  return each(static_cast<u16>(x)...) | u32(each(static_cast<u16>(x >> 16)...)) << 16;
}

template <class Value, class Round>
void half_arithmetic(Table& t, const std::string& kind, Value, Round) {
  using H = Halves<Value, Round>;
  binary<u16, u16, u16>(t, "add." + kind, [](u16 x, u16 y) { return H::add(x, y); });
  binary<u16, u16, u16>(t, "sub." + kind, [](u16 x, u16 y) { return H::sub(x, y); });
  binary<u16, u16, u16>(t, "mul." + kind, [](u16 x, u16 y) { return H::mul(x, y); });
  ternary<u16, u16, u16, u16>(t, "fma." + kind, [](u16 x, u16 y, u16 z) { return H::fma(x, y, z); });
  binary<u32, u32, u32>(t, "add." + kind + "x2", [](u32 x, u32 y) { return packed(H::add, x, y); });
  binary<u32, u32, u32>(t, "sub." + kind + "x2", [](u32 x, u32 y) { return packed(H::sub, x, y); });
  binary<u32, u32, u32>(t, "mul." + kind + "x2", [](u32 x, u32 y) { return packed(H::mul, x, y); });
  ternary<u32, u32, u32, u32>(t, "fma." + kind + "x2", [](u32 x, u32 y, u32 z) { return packed(H::fma, x, y, z); });
  unary<u16, u16>(t, "neg." + kind, [](u16 x) { return static_cast<u16>(x ^ 0x8000); });
  unary<u16, u16>(t, "abs." + kind, [](u16 x) { return static_cast<u16>(x & 0x7fff); });
  unary<u32, u32>(t, "abs." + kind + "x2", [](u32 x) { return x & 0x7fff7fff; });
  binary<u16, u16, u16>(t, "min." + kind, [](u16 x, u16 y) { return Round{}(least(Value{}(x), Value{}(y))); });
  binary<u16, u16, u16>(t, "max." + kind, [](u16 x, u16 y) { return Round{}(greatest(Value{}(x), Value{}(y))); });
  comparisons<u16>(t, kind, [](u16 x) { return Value{}(x); });
}

void packed_comparisons(Table& t) {
  binary<u32, u32, u32>(t, "set.ge.u32.f16x2", [](u32 x, u32 y) {
    return packed([](u16 a, u16 b) { return u16(from_f16(a) >= from_f16(b) ? 0xffff : 0); }, x, y);
  });
  binary<u32, u32, u32>(t, "set.eq.u32.f16x2", [](u32 x, u32 y) {
    return packed([](u16 a, u16 b) { return u16(from_f16(a) == from_f16(b) ? 0xffff : 0); }, x, y);
  });
}

}  // namespace

void add_floats(Table& t) {
  arithmetic<f32>(t, "f32");
  arithmetic<f64>(t, "f64");
  half_arithmetic(t, "bf16", [](u16 x) { return from_bf16(x); }, [](f32 x) { return to_bf16(x); });
  half_arithmetic(t, "f16", [](u16 x) { return from_f16(x); }, [](f32 x) { return to_f16(x); });
  packed_comparisons(t);
  ternary<f32, f32, f32, f32>(t, "fma.rm.f32", [](f32 x, f32 y, f32 z) { return one_nan(fma_down(x, y, z)); });
  ternary<f32, f32, f32, f32>(t, "fma.ftz.f32", [](f32 x, f32 y, f32 z) {
    return one_nan(flush(std::fma(flush(x), flush(y), flush(z))));
  });
  binary<f32, f32, f32>(t, "add.ftz.f32", [](f32 x, f32 y) { return one_nan(flush(flush(x) + flush(y))); });
  binary<f32, f32, f32>(t, "sub.ftz.f32", [](f32 x, f32 y) { return one_nan(flush(flush(x) - flush(y))); });
  binary<f32, f32, f32>(t, "mul.ftz.f32", [](f32 x, f32 y) { return one_nan(flush(flush(x) * flush(y))); });
  unary<f32, f32>(t, "abs.ftz.f32", [](f32 x) { return flush(std::fabs(x)); });
  binary<f32, f32, f32>(t, "div.full.f32", [](f32 x, f32 y) { return one_nan(quotient(x, y)); });
  binary<f32, f32, f32>(t, "div.full.ftz.f32", [](f32 x, f32 y) {
    return one_nan(flush(quotient(flush(x), flush(y))));
  });
  binary<f32, f32, f32>(t, "div.approx.f32", [](f32 x, f32 y) { return one_nan(fast_quotient(x, y)); });
  unary<f32, f32>(t, "sqrt.ftz.f32", [](f32 x) { return flush(std::sqrt(flush(x))); });
  unary<f32, f32>(t, "rcp.ftz.f32", [](f32 x) { return flush(1 / flush(x)); });
  unary<f32, f32>(t, "ex2.approx.f32", [](f32 x) { return ex2(x); });
  unary<f32, f32>(t, "ex2.approx.ftz.f32", [](f32 x) { return flush(ex2(flush(x))); });
  unary<f32, f32>(t, "lg2.approx.f32", [](f32 x) { return lg2(x); });
  unary<f32, f32>(t, "lg2.approx.ftz.f32", [](f32 x) { return flush(lg2(flush(x))); });
  unary<f32, f32>(t, "rcp.approx.f32", [](f32 x) { return rcp(x); });
  unary<f32, f32>(t, "rcp.approx.ftz.f32", [](f32 x) { return flush(rcp(flush(x))); });
  unary<f32, f32>(t, "rsqrt.approx.f32", [](f32 x) { return rsqrt(x); });
  unary<f32, f32>(t, "rsqrt.approx.ftz.f32", [](f32 x) { return flush(rsqrt(flush(x))); });
  unary<f32, f32>(t, "sqrt.approx.f32", [](f32 x) { return square_root(x); });
  unary<f32, f32>(t, "sqrt.approx.ftz.f32", [](f32 x) { return flush(square_root(flush(x))); });
  unary<f32, f32>(t, "tanh.approx.f32", [](f32 x) { return hyperbolic_tangent(x); });
  unary<f32, f32>(t, "sin.approx.f32", [](f32 x) { return sine(x); });
  unary<f32, f32>(t, "cos.approx.f32", [](f32 x) { return cosine(x); });
  unary<f64, f64>(t, "rcp.approx.ftz.f64", [](f64 x) { return rcp_upper(x); });
}
