// The address, shape, strides and element type of any array object.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>

namespace qccl {

// The stream of a consumer that orders the work itself.
constexpr std::int64_t kNoOrder = -1;

// The memory of an array. The ndarray owns the producer's DLPack capsule or buffer view and keeps the memory alive.
struct View {
  nanobind::object producer;  // released after its capsule; null where the ndarray itself refers to it
  nanobind::ndarray<nanobind::ro> array;
  bool readonly;

  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(array.data()); }
  int device_type() const { return array.device_type(); }
  int device_id() const { return array.device_id(); }
};

// The memory of anything with __dlpack__ or the buffer protocol; throws nb::type_error.
//
// With a stream (as DLPack counts) the object must have __dlpack__, whose errors are thrown as they are. If its memory
// is on a GPU, its library puts the array's work so far before that stream, unless this is kNoOrder.
View describe(nanobind::handle object, std::optional<std::int64_t> stream = std::nullopt);

// Adds View and describe() to the module.
void bind_dlpack(nanobind::module_& m);

}  // namespace qccl
