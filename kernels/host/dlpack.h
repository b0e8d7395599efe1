// The address, layout and element type of any array object.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

namespace qccl {

// The memory of an array. The ndarray owns the producer's DLPack capsule or buffer view and keeps the memory alive.
struct View {
  nanobind::ndarray<nanobind::ro> array;
  bool readonly;

  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(array.data()); }
  int device_type() const { return array.device_type(); }
  int device_id() const { return array.device_id(); }
};

// The memory of anything with __dlpack__ or the buffer protocol; throws nb::type_error.
View describe(nanobind::handle object);

// Adds View and describe() to the module.
void bind_dlpack(nanobind::module_& m);

}  // namespace qccl
