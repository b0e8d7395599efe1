#include "mappings.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>

namespace qccl {

namespace {

// The pages from the one of the first byte to the one of the last.
struct Pages {
  std::uintptr_t first, stop;

  Pages(std::uintptr_t address, std::size_t nbytes)
      : first(address & ~(size() - 1)), stop((address + nbytes + size() - 1) & ~(size() - 1)) {}

  static std::uintptr_t size() {
    static const auto found = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    return found;
  }

  std::size_t count() const { return (stop - first) / size(); }
};

// To write: the kernel combines the word with 0 by an atomic OR, and wakes nobody. To read: it copies a set of signals, and
// then refuses the operation -1 on it (Abseil's AddressIsReadable() asks so); that takes half the time of a futex.
bool may_access_word(std::uintptr_t address, bool writes) {
  static std::uint32_t nobody;
  const unsigned long word = address & ~std::uintptr_t{7};  // is in one page
  const long done =
      writes ? syscall(SYS_futex, &nobody, FUTEX_WAKE_OP_PRIVATE, 0, nullptr, word, FUTEX_OP(FUTEX_OP_OR, 0, 0, 0))
             : syscall(SYS_rt_sigprocmask, -1, word, nullptr, 8);
  return done >= 0 || errno != EFAULT;  // a sandbox that forbids the call says EPERM
}

// Whether all mappings of the pages allow it.
bool has_permission(const Pages& pages, bool writes) {
  std::FILE* const lines = std::fopen("/proc/self/maps", "re");
  if (!lines) return true;  // /proc is not mounted
  bool allowed = true;
  std::uintptr_t low, high;
  char has[5];
  while (allowed && std::fscanf(lines, "%" SCNxPTR "-%" SCNxPTR " %4s%*[^\n]", &low, &high, has) == 3)
    allowed = low >= pages.stop || high <= pages.first || has[writes ? 1 : 0] == (writes ? 'w' : 'r');
  std::fclose(lines);
  return allowed;
}

}  // namespace

bool may_access(std::uintptr_t address, std::size_t nbytes, bool writes) {
  if (!may_still_access(address, nbytes, writes)) return false;
  const Pages pages(address, nbytes);
  return pages.count() <= 2 || has_permission(pages, writes);
}

bool may_still_access(std::uintptr_t address, std::size_t nbytes, bool writes) {
  const Pages pages(address, nbytes);
  if (!may_access_word(address, writes)) return false;
  if (pages.count() > 1 && !may_access_word(address + nbytes - 1, writes)) return false;
  // With MS_ASYNC nothing is written; the kernel only goes through the mappings.
  return pages.count() <= 2 ||
         !(msync(reinterpret_cast<void*>(pages.first), pages.stop - pages.first, MS_ASYNC) && errno == ENOMEM);
}

}  // namespace qccl

#else

namespace qccl {

bool may_access(std::uintptr_t, std::size_t, bool) { return true; }

bool may_still_access(std::uintptr_t, std::size_t, bool) { return true; }

}  // namespace qccl

#endif
