// Within its scope the processor rounds to nearest even and keeps subnormals. Another library may have changed this thread's
// mode (flush to zero is common), and a rank's bytes must not depend on it.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace qccl {

class FloatEnvironment {
 public:
#if defined(__x86_64__)
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }
#else
  FloatEnvironment() { std::fegetenv(&saved_), std::fesetenv(FE_DFL_ENV); }
  ~FloatEnvironment() { std::fesetenv(&saved_); }
#endif
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  unsigned saved_;
#else
  std::fenv_t saved_;
#endif
};

}  // namespace qccl
