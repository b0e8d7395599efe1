// What the fuzz targets of this folder share: reading an input, and memory of an exact size. A target is a program: its
// function fuzz() gets one input after the other from libFuzzer. scripts/fuzz builds and runs them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace fuzz {

// The bytes of an input, from the first to the last. Behind the last there are zeros.
class Input {
 public:
  Input(const unsigned char* data, std::size_t nbytes) : next_(data), end_(data + nbytes) {}

  bool is_empty() const { return next_ == end_; }
  std::size_t left() const { return static_cast<std::size_t>(end_ - next_); }
  template <class T>
  T take() {
    T found{};
    take(&found, sizeof found);
    return found;
  }
  unsigned byte() { return take<unsigned char>(); }
  void take(void* to, std::size_t nbytes) {
    const std::size_t some = std::min(nbytes, left());
    if (some) std::memcpy(to, next_, some);
    if (some < nbytes) std::memset(static_cast<unsigned char*>(to) + some, 0, nbytes - some);
    next_ += some;
  }

 private:
  const unsigned char *next_, *end_;
};

// Memory of exactly so many bytes: AddressSanitizer ends the program at an access beside them. It does not know zeros from
// what a function has to write, so the bytes are `with` at first.
class Bytes {
 public:
  explicit Bytes(std::size_t nbytes, int with = 0xa5) : nbytes_(nbytes), data_(new unsigned char[nbytes]) { fill(with); }
  void fill(int with) { std::memset(data_.get(), with, nbytes_); }
  unsigned char* data() const { return data_.get(); }
  std::size_t size() const { return nbytes_; }
  bool operator==(const Bytes& other) const {
    return nbytes_ == other.nbytes_ && !std::memcmp(data(), other.data(), nbytes_);
  }

 private:
  std::size_t nbytes_;
  std::unique_ptr<unsigned char[]> data_;
};

// A finding: libFuzzer keeps the input.
inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "finding: %s\n", what);
  std::abort();
}

void fuzz(Input input);

}  // namespace fuzz

extern "C" int LLVMFuzzerRunDriver(int* argc, char*** argv, int (*test)(const std::uint8_t* data, std::size_t nbytes));

int main(int argc, char** argv) {
  return LLVMFuzzerRunDriver(&argc, &argv, [](const std::uint8_t* data, std::size_t nbytes) {
    fuzz::fuzz({data, nbytes});
    return 0;
  });
}
