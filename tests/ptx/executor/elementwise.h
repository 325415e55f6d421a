// Operations that compute each lane of the destination from the same lane of the sources.
#pragma once

#include "table.h"

// D is the type of the destination, A are the types of the sources, and F computes a lane. A lane of the destination is
// undefined if a source is undefined in this lane.
template <class F, class D, class... A>
struct Each {
  template <size_t... k>
  static Next run(Launch& launch, Warp& warp, const Record& record, u32 mask, std::index_sequence<k...>) {
    D* to = lanes_of<D>(launch, warp, record, 0);
    const std::tuple<const A*...> from{lanes_of<const A>(launch, warp, record, k + 1)...};
    if (mask == kAll) {
#pragma GCC ivdep
      for (u32 l = 0; l < kLanes; l++) to[l] = F{}(std::get<k>(from)[l]...);
    } else {
      for_lanes(mask, [&](u32 l) { to[l] = F{}(std::get<k>(from)[l]...); });
    }
    const u64 undefined = (undefined_lanes(launch, warp, record, k + 1) | ...);
    set_undefined(undefined_lanes(launch, warp, record, 0), either(undefined), mask);
    return Next::following;
  }
  static Next step(Launch& launch, Block&, Warp& warp, const Record& record, u32 mask) {
    return run(launch, warp, record, mask, std::index_sequence_for<A...>{});
  }
};

template <class F, class T>
struct Compare {
  static Next step(Launch& launch, Block&, Warp& warp, const Record& record, u32 mask) {
    const T* x = lanes_of<const T>(launch, warp, record, 1);
    const T* y = lanes_of<const T>(launch, warp, record, 2);
    u32 found = 0;
    for (u32 l = 0; l < kLanes; l++) found |= static_cast<u32>(F{}(x[l], y[l])) << l;
    u32& to = predicate(launch, warp, record, 0);
    to = (to & ~mask) | (found & mask);
    const u64 undefined = undefined_lanes(launch, warp, record, 1) | undefined_lanes(launch, warp, record, 2);
    set_undefined(undefined_lanes(launch, warp, record, 0), either(undefined), mask);
    return Next::following;
  }
};

template <class D, class A, class F>
void unary(Table& table, const std::string& name, F) {
  table.add(name, Each<F, D, A>::step);
}
template <class D, class A, class B, class F>
void binary(Table& table, const std::string& name, F) {
  table.add(name, Each<F, D, A, B>::step);
}
template <class D, class A, class B, class C, class F>
void ternary(Table& table, const std::string& name, F) {
  static_assert(!std::is_pointer_v<F>, "F must be a lambda: only its type is used");
  table.add(name, Each<F, D, A, B, C>::step);
}
template <class T, class F>
void compare(Table& table, const std::string& name, F) {
  table.add(name, Compare<F, T>::step);
}
