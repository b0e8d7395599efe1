#include "call_table.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dlpack.h"
#include "mappings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace qccl {

namespace {

// Entries, and arrays of all entries, after which the table is emptied: a program whose arguments never repeat must not
// fill the memory. An array takes almost a kilobyte, with what its call's payload holds for it.
constexpr std::size_t kMostEntries = 4096, kMostArrays = 65536;

// The memory layout of NumPy's arrays, which is part of its binary interface (PyArrayObject_fields in ndarraytypes.h).
struct NumpyArray {
  PyObject_HEAD
  const void* data;
  int ndim;
  const Py_ssize_t *shape, *strides;  // strides in bytes
  PyObject *base, *dtype;
  int flags;

  static constexpr int kWriteable = 0x0400;
};

PyTypeObject* numpy_type = nullptr;  // numpy.ndarray, when as_numpy() has checked its layout

// An object as an array of NumPy; null if it is anything else, also an instance of a subclass, or if NumPy's layout is not
// the one above. Describing an array by NumPy's own functions takes ten times as long, and a repeated call only compares.
const NumpyArray* as_numpy(nb::handle object) {
  static bool is_other = false;  // NumPy's layout
  PyTypeObject* const type = Py_TYPE(object.ptr());
  auto* const array = reinterpret_cast<const NumpyArray*>(object.ptr());
  if (type == numpy_type) return array;
  if (numpy_type || is_other) return nullptr;
  const nb::object name = nb::steal(PyType_GetName(type));
  if (!name.is_valid()) nb::raise_python_error();
  if (PyUnicode_CompareWithASCIIString(name.ptr(), "ndarray")) return nullptr;
  const nb::object module = nb::steal(PyImport_GetModule(nb::str("numpy").ptr()));
  if (!module.is_valid() || !module.attr("ndarray").is(nb::handle(reinterpret_cast<PyObject*>(type)))) return nullptr;
  const nb::tuple shape = nb::cast<nb::tuple>(object.attr("shape")), strides = nb::cast<nb::tuple>(object.attr("strides"));
  const auto ndim = static_cast<std::size_t>(array->ndim);
  is_other = ndim != shape.size() || nb::cast<std::uintptr_t>(object.attr("ctypes").attr("data")) !=
                                         reinterpret_cast<std::uintptr_t>(array->data);
  for (std::size_t i = 0; i < ndim && !is_other; ++i)
    is_other = nb::cast<Py_ssize_t>(shape[i]) != array->shape[i] || nb::cast<Py_ssize_t>(strides[i]) != array->strides[i];
  is_other = is_other || !object.attr("dtype").is(nb::handle(array->dtype)) ||
             nb::cast<bool>(object.attr("flags").attr("writeable")) != ((array->flags & NumpyArray::kWriteable) != 0);
  if (is_other) return nullptr;
  numpy_type = type;
  return array;
}

// The arguments of a call: the addresses and forms of its arrays, and its options. A key that is looked up does not
// outlive its call's arguments, so it borrows them: counting a reference takes two calls with Python's stable ABI.
struct Key {
  std::vector<std::uint64_t> words;
  std::vector<nb::handle> values;
  std::vector<nb::object> held;  // references to the values, or to the first of them: see hold()

  Key() {
    words.reserve(48);
    values.reserve(16);
  }

  void add_pointer(const void* pointer) { words.push_back(reinterpret_cast<std::uintptr_t>(pointer)); }

  // Adds an option; false if its value may change, or may equal a value with another meaning. An instance of
  // `constant` equals only itself: its own comparison would be Python code.
  bool add_option(PyObject* value, PyTypeObject* constant, bool is_element = false) {
    PyTypeObject* type = Py_TYPE(value);
    add_pointer(type);
    if (value == Py_None) return true;
    if (type == &PyUnicode_Type || type == &PyLong_Type || type == &PyBool_Type || type == &PyFloat_Type) {
      add_hashed(value);
      return true;
    }
    const bool is_list = type == &PyTuple_Type || type == &PyList_Type;
    if (!is_list) values.push_back(value);
    if (PyType_IsSubtype(type, constant)) {
      add_pointer(value);
      return true;
    }
    if (is_list && is_element) return false;
    if (is_list) {  // its elements are compared, so that it may change later
      const nb::sequence elements = nb::borrow<nb::sequence>(value);
      words.push_back(nb::len(elements));
      for (const nb::handle element : elements)
        if (!add_option(element.ptr(), constant, true)) return false;
      hold();  // a finalizer may remove them from the list
      return true;
    }
    return false;
  }

  // A value whose type is in the key, or known: the name of a keyword.
  void add_hashed(PyObject* value) {
    values.push_back(value);
    words.push_back(static_cast<std::uint64_t>(PyObject_Hash(value)));
  }

  void add_array(PyTypeObject* type, const View& view) {
    const nb::dlpack::dtype dtype = view.array.dtype();
    add_pointer(type);
    words.push_back(view.address());
    words.push_back(dtype.code | dtype.bits << 8 | static_cast<std::uint64_t>(dtype.lanes) << 16 |
                    static_cast<std::uint64_t>(view.readonly) << 32 |
                    static_cast<std::uint64_t>(view.device_type()) << 40);
    words.push_back(static_cast<std::uint64_t>(view.device_id()));
    words.push_back(view.array.ndim());
    for (std::size_t i = 0; i < view.array.ndim(); ++i) {
      words.push_back(view.array.shape(i));
      words.push_back(static_cast<std::uint64_t>(view.array.stride(i)));
    }
    values.push_back(type);  // so that no other type gets its address
  }

  void add_numpy(const NumpyArray& array) {
    add_pointer(Py_TYPE(const_cast<PyObject*>(&array.ob_base)));
    add_pointer(array.data);
    add_pointer(array.dtype);
    words.push_back(static_cast<std::uint64_t>(array.flags & NumpyArray::kWriteable));
    words.push_back(static_cast<std::uint64_t>(array.ndim));
    for (int i = 0; i < array.ndim; ++i) {
      words.push_back(static_cast<std::uint64_t>(array.shape[i]));
      words.push_back(static_cast<std::uint64_t>(array.strides[i]));
    }
    values.push_back(array.dtype);  // so that no other element type gets its address
  }

  // Keeps the values alive, whatever becomes of the arguments: before Python code runs, and in the table.
  void hold() {
    while (held.size() < values.size()) held.push_back(nb::borrow(values[held.size()]));
  }

  std::size_t hash() const {
    std::uint64_t found = 0;
    for (const std::uint64_t word : words) found = (found ^ word) * 0x9E3779B97F4A7C15u + (found >> 29);
    return found;
  }

  bool operator==(const Key& other) const {
    if (words != other.words || values.size() != other.values.size()) return false;
    for (std::size_t i = 0; i < values.size(); ++i)
      if (PyObject_RichCompareBool(values[i].ptr(), other.values[i].ptr(), Py_EQ) != 1) return false;
    return true;
  }
};

// Whether it is a number such as numpy.int64. It may be a raw address, and then its value counts, not its own memory.
bool is_integer(const View& view) {
  const auto code = static_cast<nb::dlpack::dtype_code>(view.array.dtype().code);
  return view.array.ndim() == 0 && (code == nb::dlpack::dtype_code::Int || code == nb::dlpack::dtype_code::UInt);
}

struct HashOfKey {
  std::size_t operator()(const Key& key) const { return key.hash(); }
};

// Memory at a raw pointer: its address and bytes, and whether the call writes them.
using Pointed = std::tuple<std::uintptr_t, std::size_t, bool>;

class CallTable {
 public:
  CallTable(nb::type_object constant, nb::object describe, nb::object is_there)
      : constant_(std::move(constant)), describe_(std::move(describe)), is_there_(std::move(is_there)) {}

  void add(const nb::str& name, const nb::tuple& arrays, const nb::tuple& options, const nb::dict& keywords,
           nb::object payload, std::vector<Pointed> pointed) {
    Key key;
    nb::list views;
    if (!describe_call(name, arrays, options, keywords, key, views)) return;
    key.hold();
    if (entries_.size() >= kMostEntries || array_count_ + arrays.size() > kMostArrays) clear();
    array_count_ += arrays.size();
    entries_.insert_or_assign(std::move(key), Entry{std::move(payload), std::move(pointed)});
  }

  nb::object find(const nb::str& name, const nb::tuple& arrays, const nb::tuple& options,
                  const nb::dict& keywords) const {
    Key key;
    nb::list found;
    if (entries_.empty() || !describe_call(name, arrays, options, keywords, key, found)) return nb::none();
    const auto entry = entries_.find(key);
    if (entry == entries_.end()) return nb::none();
    const nb::object payload = entry->second.payload;
    if (!are_there(entry->second.pointed)) return nb::none();  // the usual path says what is wrong
    return nb::make_tuple(payload, std::move(found));
  }

  // The objects are released after the table has become empty: that may run any code, which may use the table.
  void clear() {
    array_count_ = 0;
    const auto dropped = std::exchange(entries_, {});
  }

  int visit(visitproc visit, void* arg) const {
    Py_VISIT(constant_.ptr());
    Py_VISIT(describe_.ptr());
    Py_VISIT(is_there_.ptr());
    for (const auto& [key, entry] : entries_) {
      for (const nb::object& value : key.held) Py_VISIT(value.ptr());
      Py_VISIT(entry.payload.ptr());
    }
    return 0;
  }

 private:
  struct Entry {
    nb::object payload;
    std::vector<Pointed> pointed;
  };

  // Whether the memory at raw pointers may still be used.
  bool are_there(const std::vector<Pointed>& pointed) const {
    if (is_there_.is_none())
      return std::all_of(pointed.begin(), pointed.end(),
                         [](const Pointed& each) { return std::apply(may_still_access, each); });
    const std::vector<Pointed> kept = pointed;  // Python code may empty the table
    return std::all_of(kept.begin(), kept.end(),
                       [&](const Pointed& each) { return nb::cast<bool>(std::apply(is_there_, each)); });
  }

  // Makes the key of a call, and the views of its arrays; false if the call cannot be in the table. An array of
  // NumPy needs no view: it keeps its memory while it exists.
  bool describe_call(const nb::str& name, const nb::tuple& arrays, const nb::tuple& options, const nb::dict& keywords,
                     Key& key, nb::list& views) const {
    auto* const constant = reinterpret_cast<PyTypeObject*>(constant_.ptr());
    if (!key.add_option(name.ptr(), constant)) return false;
    for (const nb::handle option : options)
      if (!key.add_option(option.ptr(), constant)) return false;
    for (const auto& [keyword, value] : keywords) {
      key.add_hashed(keyword.ptr());
      if (!key.add_option(value.ptr(), constant)) return false;
    }
    for (const nb::handle array : arrays) {
      key.words.push_back(!array.is_none());
      if (array.is_none()) continue;
      if (PyLong_CheckExact(array.ptr())) {  // an integer is a raw address
        if (!key.add_option(array.ptr(), constant)) return false;
        views.append(array);
        continue;
      }
      if (!numpy_type) key.hold();  // as_numpy() calls functions of Python until it knows the type
      const NumpyArray* const numpy = describe_.is_none() ? as_numpy(array) : nullptr;
      if (numpy && numpy->ndim > 0) {  // arrays without axes may be integers
        key.add_numpy(*numpy);
        views.append(array);
        continue;
      }
      key.hold();  // a description may run any code
      try {
        nb::object view = describe_.is_none() ? nb::cast(describe(array)) : describe_(array);
        if (view.is_none()) return false;
        const auto& described = nb::cast<const View&>(view);
        if (is_integer(described)) return false;
        key.add_array(Py_TYPE(array.ptr()), described);
        views.append(std::move(view));
      } catch (const nb::builtin_exception&) {  // the usual path says what is wrong
        return false;
      } catch (const nb::python_error& error) {
        if (!error.matches(PyExc_Exception)) throw;  // Ctrl-C
        return false;
      }
    }
    return true;
  }

  const nb::type_object constant_;  // the type of options that never change
  const nb::object describe_;       // makes the view of an array; None for describe()
  const nb::object is_there_;       // asks about a pointer; None for may_still_access()
  std::unordered_map<Key, Entry, HashOfKey> entries_;
  std::size_t array_count_ = 0;
};

// The type of an array may refer to the communicator, and so to this table: the garbage collector must see the cycle.
int visit_table(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<CallTable>(self)->visit(visit, arg) : 0;
}

int clear_table(PyObject* self) {
  nb::inst_ptr<CallTable>(self)->clear();
  return 0;
}

PyType_Slot kSlots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&visit_table)},
                        {Py_tp_clear, reinterpret_cast<void*>(&clear_table)},
                        {0, nullptr}};

}  // namespace

void bind_call_table(nb::module_& m) {
  nb::class_<CallTable>(m, "CallTable", nb::type_slots(kSlots), "What earlier calls with equal arguments have proved.")
      .def(nb::init<nb::type_object, nb::object, nb::object>(), "constant"_a, "describe"_a = nb::none(),
           "is_there"_a = nb::none())
      .def("clear", &CallTable::clear, "Forget all calls.")
      .def("add", &CallTable::add, "name"_a, "arrays"_a, "options"_a, "keywords"_a, "payload"_a,
           "pointed"_a = std::vector<Pointed>(),
           "Add a call. ``pointed``: the memory at its raw pointers, of which find() asks whether it is still there.")
      .def("find", &CallTable::find, "name"_a, "arrays"_a, "options"_a, "keywords"_a,
           nb::sig("def find(self, name: str, arrays: tuple[object, ...], options: tuple[object, ...], "
                   "keywords: dict[str, object]) -> tuple[typing.Any, list[typing.Any]] | None"),
           "The payload, and a view of each array that is not None (or itself: raw addresses, NumPy's arrays).");
}

}  // namespace qccl
