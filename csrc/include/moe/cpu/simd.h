// Functions of the CPU kernels with intrinsics for AVX-512 and AVX2, mostly for masks of one bit for each element. Each
// kernel file of csrc/cpu is compiled once per instruction set (MOE_ISA).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace moe {
namespace MOE_ISA {

// A mask has a 32-bit word for every 32 elements: bit i of word w belongs to element 32 * w + i. Keys are integers that
// order as floating-point elements do (formats.h); rows of keys are padded to a multiple of kMaskBits.
constexpr int64_t kMaskBits = 32;

inline int64_t mask_words(int64_t n) { return (n + kMaskBits - 1) / kMaskBits; }

inline uint32_t low_bits(int64_t count) { return count >= kMaskBits ? ~0u : (1u << count) - 1u; }

// A mask of 32 keys: bit i is key[i] > t.
template <class Key>
inline uint32_t greater(const Key* key, Key t) {
  uint32_t word = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(Key) == 2) {
    word = _mm512_cmpgt_epi16_mask(_mm512_loadu_si512(key), _mm512_set1_epi16(t));
  } else if constexpr (sizeof(Key) == 4) {
    const __m512i limit = _mm512_set1_epi32(t);
    for (int i = 0; i < 2; ++i)
      word |= uint32_t(_mm512_cmpgt_epi32_mask(_mm512_loadu_si512(key + 16 * i), limit)) << (16 * i);
  } else {
    const __m512i limit = _mm512_set1_epi64(t);
    for (int i = 0; i < 4; ++i)
      word |= uint32_t(_mm512_cmpgt_epi64_mask(_mm512_loadu_si512(key + 8 * i), limit)) << (8 * i);
  }
#elif defined(__AVX2__)
  const auto at = [&](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(key + i)); };
  if constexpr (sizeof(Key) == 2) {
    const __m256i limit = _mm256_set1_epi16(t);
    // _mm256_packs_epi16 interleaves the 128-bit halves of its operands; the permutation restores their order.
    const __m256i packed = _mm256_packs_epi16(_mm256_cmpgt_epi16(at(0), limit), _mm256_cmpgt_epi16(at(16), limit));
    word = uint32_t(_mm256_movemask_epi8(_mm256_permute4x64_epi64(packed, 0xD8)));
  } else if constexpr (sizeof(Key) == 4) {
    const __m256i limit = _mm256_set1_epi32(t);
    for (int i = 0; i < 4; ++i)
      word |= uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(at(8 * i), limit)))) << (8 * i);
  } else {
    const __m256i limit = _mm256_set1_epi64x(t);
    for (int i = 0; i < 8; ++i)
      word |= uint32_t(_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpgt_epi64(at(4 * i), limit)))) << (4 * i);
  }
#else
  for (int i = 0; i < kMaskBits; ++i) word |= uint32_t(key[i] > t) << i;
#endif
  return word;
}

// How many of n keys are above t. n must be a multiple of 32.
template <class Key>
inline int64_t count_greater(const Key* key, int64_t n, Key t) {
  int64_t count = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(Key) == 4) {
    const __m512i limit = _mm512_set1_epi32(t);
    for (int64_t i = 0; i < n; i += 32) {
      count += _mm_popcnt_u32(_mm512_cmpgt_epi32_mask(_mm512_loadu_si512(key + i), limit));
      count += _mm_popcnt_u32(_mm512_cmpgt_epi32_mask(_mm512_loadu_si512(key + i + 16), limit));
    }
    return count;
  }
#endif
#if defined(__AVX2__)
  for (int64_t i = 0; i < n; i += kMaskBits) count += _mm_popcnt_u32(greater(key + i, t));
#else
  for (int64_t i = 0; i < n; ++i) count += key[i] > t;
#endif
  return count;
}

// Returns the sum of 32 numbers, and overwrites them.
template <class T>
inline T sum_of(T (&lanes)[kMaskBits]) {
#pragma GCC unroll 8
  for (int half = kMaskBits / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// out[i] = bit i of `word` ? in[i] : 0, for the first `count` <= 32 elements of 2, 4 or 8 bytes.
template <class Bits>
inline void keep(Bits* out, const Bits* in, uint32_t word, int64_t count) {
#if defined(__AVX512BW__)
  const uint32_t all = low_bits(count);
  word &= all;
  if constexpr (sizeof(Bits) == 2) {
    _mm512_mask_storeu_epi16(out, all, _mm512_maskz_loadu_epi16(word, in));
  } else if constexpr (sizeof(Bits) == 4) {
    for (int i = 0; i < 32; i += 16)
      _mm512_mask_storeu_epi32(out + i, uint16_t(all >> i), _mm512_maskz_loadu_epi32(uint16_t(word >> i), in + i));
  } else {
    for (int i = 0; i < 32; i += 8)
      _mm512_mask_storeu_epi64(out + i, uint8_t(all >> i), _mm512_maskz_loadu_epi64(uint8_t(word >> i), in + i));
  }
#else
  if (count < kMaskBits) {
    for (int64_t i = 0; i < count; ++i) out[i] = in[i] & Bits(-Bits(word >> i & 1u));
    return;
  }
#if defined(__AVX2__)
  // Every lane has a copy of a part of `word`, and tests its own bit.
  const auto put = [&](int i, __m256i lanes) {
    const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_and_si256(value, lanes));
  };
  if constexpr (sizeof(Bits) == 2) {
    const __m256i bit = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
    for (int i = 0; i < 2; ++i) {
      const __m256i spread = _mm256_set1_epi16(int16_t(word >> (16 * i)));
      put(16 * i, _mm256_cmpeq_epi16(_mm256_and_si256(spread, bit), bit));
    }
  } else if constexpr (sizeof(Bits) == 4) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (int i = 0; i < 4; ++i) {
      const __m256i spread = _mm256_set1_epi32(int32_t(word >> (8 * i)));
      put(8 * i, _mm256_cmpeq_epi32(_mm256_and_si256(spread, bit), bit));
    }
  } else {
    const __m256i bit = _mm256_setr_epi64x(1, 2, 4, 8);
    for (int i = 0; i < 8; ++i) {
      const __m256i spread = _mm256_set1_epi64x(word >> (4 * i));
      put(4 * i, _mm256_cmpeq_epi64(_mm256_and_si256(spread, bit), bit));
    }
  }
#else
  for (int i = 0; i < kMaskBits; ++i) out[i] = in[i] & Bits(-Bits(word >> i & 1u));
#endif
#endif
}

// out[i] = bit i of `word`, as a byte 0 or 1, for i < count <= 32.
inline void spread(uint8_t* out, uint32_t word, int64_t count) {
  uint8_t bytes[kMaskBits];
  for (int i = 0; i < 4; ++i) {
    // The product has eight copies of a byte, and copy k keeps only its bit k. Adding 0x7f to a copy sets its high
    // bit if it is not 0, and the shift moves the high bit down to bit 0.
    const uint64_t bits = (word >> (8 * i) & 0xffu) * 0x0101010101010101u & 0x8040201008040201u;
    const uint64_t ones = (bits + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
    std::memcpy(bytes + 8 * i, &ones, 8);
  }
  if (count == kMaskBits) {
    std::memcpy(out, bytes, kMaskBits);
  } else {
    std::memcpy(out, bytes, size_t(count));
  }
}

// Copies rows. With AVX2 or AVX-512, stores bypass the cache if all rows together have at least kLarge bytes, the bytes
// of a row are a multiple of 64, and `to` is aligned to a vector. 16 MB in rows of 1 KB for 64 experts are written in 0.5
// to 0.6 of the time, and written and read again in 0.9 of it; 8 MB, which stay in the cache, would take 1.6 times as long.
class RowCopy {
 public:
  RowCopy(int64_t row_bytes, int64_t all_bytes)
      : bytes_(row_bytes), around_(all_bytes >= kLarge && row_bytes % 64 == 0) {}
  ~RowCopy() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
  }

  void operator()(char* to, const char* from) const {
#if defined(__AVX512F__)
    if (around_ && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
      for (int64_t i = 0; i < bytes_; i += 64)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
      return;
    }
#elif defined(__AVX2__)
    if (around_ && reinterpret_cast<uintptr_t>(to) % 32 == 0) {
      for (int64_t i = 0; i < bytes_; i += 32)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
      return;
    }
#endif
    std::memcpy(to, from, size_t(bytes_));
  }

 private:
  static constexpr int64_t kLarge = 16 << 20;
  int64_t bytes_;
  bool around_;
};

}  // namespace MOE_ISA
}  // namespace moe
