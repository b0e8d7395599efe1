// Whether memory at a raw address may be read and written, asked of the kernel rather than of luck.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qccl {

// Whether all `nbytes` (at least one) may be read, or written. No value changes, also if other threads write some. An
// answer must cost little, because every call on raw pointers asks: the kernel is asked for the first and the last byte,
// and whether anything between is unmapped. What the pages between allow is looked up when they are seen for the first
// time. Linux; elsewhere all memory is assumed to be there.
bool may_access(std::uintptr_t address, std::size_t nbytes, bool writes);

// Forgets what was looked up.
void forget_mappings();

}  // namespace qccl
