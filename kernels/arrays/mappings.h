// Asks the kernel whether memory at a raw address may be read and written.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qccl {

// Whether all `nbytes` (at least one) may be read, or written. No value changes, even if other threads write at the same
// time. On Linux; elsewhere all memory is assumed to be there.
bool may_access(std::uintptr_t address, std::size_t nbytes, bool writes);

// Whether memory that may_access() has allowed is still there. Every call on raw pointers asks, so the answer must cost
// little: the kernel is asked for the first and the last byte, and whether anything between is unmapped, but not what the
// pages between allow.
bool may_still_access(std::uintptr_t address, std::size_t nbytes, bool writes);

}  // namespace qccl
