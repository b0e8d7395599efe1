// Within its scope the processor rounds to nearest even and keeps subnormals. Another library may have changed this thread's
// mode (flush to zero is common), and a rank's bytes must not depend on it.
#pragma once

#if defined(__x86_64__)

#include <xmmintrin.h>

namespace qccl {

class FloatEnvironment {
 public:
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  unsigned saved_;
};

}  // namespace qccl

#else

#include <cfenv>

namespace qccl {

class FloatEnvironment {
 public:
  FloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { std::fesetenv(&saved_); }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace qccl

#endif
