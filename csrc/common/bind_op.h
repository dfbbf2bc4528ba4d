// bind_op: one table per op from Python keywords to the fields of its Params struct.
//
//   bind_op<GruStepParams>(m, "gru_step", DOMINO_CUDA_LAUNCHER(gru_step_cuda), gru_step_cpu,
//                          field("out", &GruStepParams::out), ...);
//
// gives  _C.gru_step(*, out: int, ..., device: int, stream: int) -> int.  All arguments are
// keywords, none is optional: a wrong or missing name is a TypeError. All values are integers:
// pointers (tensor.data_ptr(), 0 for none), sizes, flags, dtypes as _C.F32 / _C.F16 / _C.BF16.
// device = -1 runs the CPU twin. The result is a status (common/status.h). The GIL is released
// meanwhile.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "common/status.h"

#ifdef DOMINO_WITH_CUDA
#include "common/runtime.h"
#define DOMINO_CUDA_LAUNCHER(fn) fn
#else
#define DOMINO_CUDA_LAUNCHER(fn) nullptr
#endif

namespace domino {

template <class P, class T>
struct Field {
  const char* name;
  T P::* member;
};

template <class P, class T>
Field<P, T> field(const char* name, T P::* member) {
  return {name, member};
}

// A Python number as the field's type; with an error set, false.
template <class T>
bool read_number(PyObject* value, T* out) {
  if constexpr (std::is_pointer_v<T>) {
    *out = static_cast<T>(PyLong_AsVoidPtr(value));
    return *out != nullptr || PyErr_Occurred() == nullptr;
  } else {
    const long long number = PyLong_AsLongLong(value);
    *out = static_cast<T>(number);
    if (number == -1 && PyErr_Occurred() != nullptr) return false;
    if (static_cast<long long>(*out) == number) return true;
    PyErr_Format(PyExc_OverflowError, "%lld does not fit its field", number);
    return false;
  }
}

template <class P>
int run_op(const P& params, int device, std::uintptr_t stream, int (*cuda)(const P&, void*),
           int (*cpu)(const P&)) {
  pybind11::gil_scoped_release release;
  if (device < 0) return cpu(params);
#ifdef DOMINO_WITH_CUDA
  DeviceGuard guard(device);
  if (guard.status() != kOk) return guard.status();
  const int status = cuda(params, reinterpret_cast<void*>(stream));
  if (status > 0) forget_cuda_error();
  return status;
#else
  (void)cuda, (void)stream;
  return kNoCuda;
#endif
}

// What Python calls. By hand, because pybind11 takes 4 us to match 55 keywords: here a call that
// keeps the table's order costs a comparison of addresses a keyword.
template <class P, class... T>
class BoundOp {
 public:
  BoundOp(const char* name, int (*cuda)(const P&, void*), int (*cpu)(const P&),
          Field<P, T>... fields)
      : name_(name), cuda_(cuda), cpu_(cpu), fields_(fields...) {
    const char* names[] = {fields.name..., "device", "stream"};
    doc_ = name_ + "(*";
    for (size_t k = 0; k < kKeywords; ++k) {
      keywords_[k] = PyUnicode_InternFromString(names[k]);
      doc_ += std::string(", ") + names[k] + ": int";
    }
    doc_ += ") -> int";
    method_ = {name_.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)),
               METH_FASTCALL | METH_KEYWORDS, doc_.c_str()};
  }

  PyMethodDef* method() { return &method_; }

 private:
  static constexpr size_t kFields = sizeof...(T), kKeywords = kFields + 2;

  struct Call {
    P params{};
    int device = 0;
    std::uintptr_t stream = 0;
  };

  template <size_t k>
  static bool set(const BoundOp& op, Call* call, PyObject* value) {
    if constexpr (k < kFields) {
      return read_number(value, &(call->params.*(std::get<k>(op.fields_).member)));
    } else if constexpr (k == kFields) {
      return read_number(value, &call->device);
    } else {
      return read_number(value, &call->stream);
    }
  }
  template <size_t... k>
  static bool set(const BoundOp& op, Call* call, size_t which, PyObject* value,
                  std::index_sequence<k...>) {
    using Setter = bool (*)(const BoundOp&, Call*, PyObject*);
    static constexpr Setter setters[] = {&BoundOp::template set<k>...};
    return setters[which](op, call, value);
  }

  // Which keyword this is, most likely the one at `likely`.
  size_t find(PyObject* keyword, size_t likely) const {
    for (size_t n = 0; n < kKeywords; ++n) {
      const size_t k = (likely + n) % kKeywords;
      if (keywords_[k] == keyword) return k;
    }
    for (size_t k = 0; k < kKeywords; ++k)  // not interned
      if (PyUnicode_Compare(keywords_[k], keyword) == 0) return k;
    return kKeywords;
  }

  static PyObject* call(PyObject* self, PyObject* const* values, Py_ssize_t positional,
                        PyObject* keywords) {
    const auto& op = *static_cast<const BoundOp*>(PyCapsule_GetPointer(self, nullptr));
    const size_t count = keywords == nullptr ? 0 : static_cast<size_t>(PyTuple_GET_SIZE(keywords));
    Call call;
    for (size_t n = 0; n < count; ++n) {
      PyObject* keyword = PyTuple_GET_ITEM(keywords, n);
      const size_t k = op.find(keyword, n);
      if (k == kKeywords)
        return PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'",
                            op.name_.c_str(), keyword);
      if (!set(op, &call, k, values[n], std::make_index_sequence<kKeywords>())) return nullptr;
    }
    if (positional != 0 || count != kKeywords)  // no name comes twice: Python sees to that
      return PyErr_Format(PyExc_TypeError, "%s() takes %zu keyword arguments, %zu were given",
                          op.name_.c_str(), kKeywords, count);
    return PyLong_FromLong(run_op(call.params, call.device, call.stream, op.cuda_, op.cpu_));
  }

  std::string name_, doc_;
  int (*cuda_)(const P&, void*);
  int (*cpu_)(const P&);
  std::tuple<Field<P, T>...> fields_;
  PyObject* keywords_[kKeywords];
  PyMethodDef method_;
};

template <class P, class... T>
void bind_op(pybind11::module_& m, const char* name, int (*cuda)(const P&, void*),
             int (*cpu)(const P&), Field<P, T>... fields) {
  auto* op = new BoundOp<P, T...>(name, cuda, cpu, fields...);  // lives as long as the process
  const pybind11::capsule self(op);
  const auto module_name = m.attr("__name__");
  m.attr(name) = pybind11::reinterpret_steal<pybind11::object>(
      PyCFunction_NewEx(op->method(), self.ptr(), module_name.cast<pybind11::object>().ptr()));
}

}  // namespace domino
