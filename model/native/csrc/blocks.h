// How the bytes of a KV block lie, so that both products of attention read whole panels of 16 columns.
//
// With P numbers of type T to a 4-byte lane (`Pair`): K is [D / P, B, P], so that 16 keys are the columns of a
// panel whose inputs are the D channels; V is [B / P, D, P], so that 16 channels are the columns of a panel
// whose inputs are the keys. B and D are multiples of 16.
#pragma once

#include "simd.h"

namespace headroom {

// The panel of keys [offset, offset + 16) of a K block; its next lane of channels is B lanes on.
template <class T>
inline const uint32_t* key_panel(const T* block, int64_t offset) {
  return reinterpret_cast<const uint32_t*>(block) + offset;
}

// The panels of values [offset, offset + 16) of a V block: 16 channels each, side by side; the next lane of
// keys is D lanes on.
template <class T>
inline const uint32_t* value_panel(const T* block, int64_t offset, int64_t head_dim) {
  return reinterpret_cast<const uint32_t*>(block + offset * head_dim);
}

inline void put(float* k_block, float* v_block, int64_t block_size, int64_t head_dim, int64_t offset,
                const float* k, const float* v) {
  for (int64_t d = 0; d < head_dim; ++d) k_block[d * block_size + offset] = k[d];
  std::memcpy(v_block + offset * head_dim, v, head_dim * sizeof(float));
}

// Writes one token's K and V [D] to its place in the block. Tokens of one block may be put by different threads
// at once: of a lane that two of them share, each writes its own half only.
inline void put(bf16* k_block, bf16* v_block, int64_t block_size, int64_t head_dim, int64_t offset,
                const bf16* k, const bf16* v) {
  for (int64_t d = 0; d < head_dim; d += 2) std::memcpy(k_block + d * block_size + 2 * offset, k + d, 4);
  bf16* pair = v_block + (offset & ~int64_t(1)) * head_dim;
#if defined(__AVX512BW__)
  const __mmask32 half = offset & 1 ? 0xaaaaaaaau : 0x55555555u;
  const unsigned shift = offset & 1 ? 16 : 0;
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const u32x16 lanes = __builtin_convertvector(load<u16x16>(v + d), u32x16) << shift;
    _mm512_mask_storeu_epi16(pair + 2 * d, half, (__m512i)lanes);
  }
#else
  for (int64_t d = 0; d < head_dim; ++d) pair[2 * d + (offset & 1)] = v[d];
#endif
}

// Writes k and v [count, D] into slots (block id * B + offset).
template <class T>
void write(const T* k, const T* v, const int64_t* slots, int64_t count, int64_t block_size, int64_t head_dim,
           T* k_arena, T* v_arena) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t block = slots[i] / block_size * block_size * head_dim;
    put(k_arena + block, v_arena + block, block_size, head_dim, slots[i] % block_size, k + i * head_dim,
        v + i * head_dim);
  }
}

}  // namespace headroom
