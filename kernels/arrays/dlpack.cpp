#include "dlpack.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace qccl {

namespace {

using Writable = nb::ndarray<>;
using ReadOnly = nb::ndarray<nb::ro>;

std::string dtype_name(nb::dlpack::dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  std::string name;
  switch (static_cast<Code>(dtype.code)) {
    case Code::Bool: return "bool";
    case Code::Int: name = "int"; break;
    case Code::UInt: name = "uint"; break;
    case Code::Float: name = "float"; break;
    case Code::Bfloat: name = "bfloat"; break;
    case Code::Complex: name = "complex"; break;
    default: return "DLPack type " + std::to_string(dtype.code) + " of " + std::to_string(dtype.bits) + " bits";
  }
  name += std::to_string(dtype.bits);
  return dtype.lanes == 1 ? name : name + "x" + std::to_string(dtype.lanes);
}

// Whether an object with the buffer protocol is read-only. JAX's arrays are, but their DLPack capsules are of the old kind,
// which has no flag for it, and the C functions of a type do not tell it either.
bool refuses_writing(nb::handle object) {
  if (!PyObject_CheckBuffer(object.ptr())) return false;
  Py_buffer buffer;
  if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_WRITABLE | PyBUF_STRIDES) == 0) {
    PyBuffer_Release(&buffer);
    return false;
  }
  PyErr_Clear();
  return true;
}

// The C functions that DLPack 1.3 defines for an array type (DLPackExchangeAPI), as far as they are used here.
struct ExchangeFunctions {
  std::uint32_t major, minor;
  void* previous;
  void *allocate, *export_owned, *import_owned;
  int (*describe)(void* object, nb::dlpack::dltensor* found);  // borrows from the object; may be null
};

constexpr std::uint32_t kDlpackMajor = 1, kDlpackMinor = 1;

const ExchangeFunctions* exchange_functions(PyTypeObject* type) {
  static PyObject* const name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  const nb::handle owner(reinterpret_cast<PyObject*>(type));
  if (!nb::hasattr(owner, name)) return nullptr;  // takes less time than an AttributeError
  const nb::object capsule = nb::getattr(owner, name);
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* found = static_cast<const ExchangeFunctions*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  return found->major == kDlpackMajor && found->describe ? found : nullptr;
}

bool is_on_gpu(std::int32_t device_type) {
  return device_type == nb::device::cuda::value || device_type == nb::device::cuda_managed::value;
}

// The memory of an array on the host, or else on a GPU, by its type's C functions, which take a tenth of the time of
// __dlpack__ and order nothing. Empty if the type has no such functions, or they refuse.
std::optional<View> describe_by_exchange(nb::handle object, bool on_gpu) {
  const ExchangeFunctions* functions = exchange_functions(Py_TYPE(object.ptr()));
  if (!functions) return std::nullopt;
  nb::dlpack::dltensor found;
  if (functions->describe(object.ptr(), &found)) {
    PyErr_Clear();
    return std::nullopt;
  }
  const std::int32_t device_type = found.device.device_type;
  if (on_gpu ? !is_on_gpu(device_type) : device_type != nb::device::cpu::value) return std::nullopt;
  std::vector<std::size_t> shape(found.shape, found.shape + found.ndim);
  return View{{},
              ReadOnly(static_cast<const char*>(found.data) + found.byte_offset, shape.size(), shape.data(), object,
                       found.strides, found.dtype, device_type, found.device.device_id),
              refuses_writing(object)};
}

// A memoryview of an object that has only the buffer protocol, because nanobind reads strides and arrays of ctypes have
// none; otherwise the object.
nb::object with_strides(nb::handle object) {
  if (PyObject_CheckBuffer(object.ptr()) && !nb::hasattr(object, "__dlpack__")) {
    PyObject* view = PyMemoryView_FromObject(object.ptr());
    if (view != nullptr) return nb::steal(view);
    PyErr_Clear();
  }
  return nb::borrow(object);
}

// A DLPack capsule of an array, for a consumer on this stream.
nb::object export_to(nb::handle object, std::int64_t stream) {
  const nb::object device = object.attr("__dlpack_device__")();
  const long type = PyLong_AsLong(nb::object(device[0]).ptr());
  if (type == -1 && PyErr_Occurred()) nb::raise_python_error();
  nb::dict options;
  if (is_on_gpu(static_cast<std::int32_t>(type))) options["stream"] = stream;
  const nb::object make_capsule = object.attr("__dlpack__");
  options["max_version"] = nb::make_tuple(kDlpackMajor, kDlpackMinor);
  try {
    return make_capsule(**options);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  nb::del(options["max_version"]);  // the library is older than versions
  return make_capsule(**options);
}

template <class Get>
nb::tuple per_axis(const View& view, Get get) {
  PyObject* values = PyTuple_New(static_cast<Py_ssize_t>(view.array.ndim()));
  if (!values) nb::raise_python_error();
  for (std::size_t i = 0; i < view.array.ndim(); ++i)
    PyTuple_SetItem(values, static_cast<Py_ssize_t>(i), nb::cast(get(i)).release().ptr());
  return nb::steal<nb::tuple>(values);
}

std::string dtype(const View& view) { return dtype_name(view.array.dtype()); }

nb::tuple shape(const View& view) {
  return per_axis(view, [&](std::size_t i) { return view.array.shape(i); });
}

nb::tuple strides(const View& view) {
  return per_axis(view, [&](std::size_t i) { return view.array.stride(i); });
}

nb::tuple form(const View& view) { return nb::make_tuple(dtype(view), shape(view), strides(view)); }

}  // namespace

View describe(nb::handle object, std::optional<std::int64_t> stream) {
  if (!stream || *stream == kNoOrder)
    if (std::optional<View> view = describe_by_exchange(object, stream.has_value())) return *std::move(view);
  const nb::object source = stream ? export_to(object, *stream) : with_strides(object);
  const nb::object producer = stream ? nb::borrow(object) : nb::object();
  ReadOnly array;
  Writable writable;
  if (nb::try_cast(source, writable, false)) return {producer, ReadOnly(writable), refuses_writing(source)};
  if (nb::try_cast(source, array, false)) return {producer, array, true};
  const nb::object type = nb::getattr(object.type(), "__name__");
  throw nb::type_error(("a " + nb::cast<std::string>(type) +
                        " gives no access to its memory: neither __dlpack__ nor the buffer protocol works, or its "
                        "element type has no DLPack equivalent")
                           .c_str());
}

void bind_dlpack(nb::module_& m) {
  nb::class_<View>(m, "View", "The memory of an array; keeps it alive.")
      .def_prop_ro("address", &View::address, "Address of element (0, 0, ...).")
      .def_prop_ro("shape", &shape, nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro("strides", &strides, nb::sig("def strides(self) -> tuple[int, ...]"), "In elements.")
      .def_prop_ro("dtype", &dtype, "As NumPy names it, e.g. \"float32\".")
      .def_prop_ro("form", &form, nb::sig("def form(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]"),
                   "Element type, shape and strides.")
      .def_prop_ro("device_type", &View::device_type, "DLPack's number: 1 is host memory, 2 is CUDA.")
      .def_prop_ro("device_id", &View::device_id)
      .def_ro("readonly", &View::readonly);
  m.def("describe", &describe, "array"_a.none(), "stream"_a = nb::none(),
        "The memory of anything with ``__dlpack__`` or the buffer protocol, without a copy.\n\n"
        "Raises TypeError where the object gives no access to it. With a ``stream`` (as DLPack counts) the object must "
        "have ``__dlpack__``, whose errors are raised as they are; a GPU's library puts the array's work so far before "
        "that stream, unless it is -1.");
}

}  // namespace qccl
