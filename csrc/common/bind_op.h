// bind_op: one table per op from Python keywords to the fields of its Params struct.
//
//   bind_op<GruStepParams>(m, "gru_step", DOMINO_CUDA_LAUNCHER(gru_step_cuda), gru_step_cpu,
//                          field("out", &GruStepParams::out), ...);
//
// gives  _C.gru_step(*, out: int, ..., device: int, stream: int) -> int.  All arguments are
// keywords, none is optional: a wrong or missing name is a TypeError. Pointers arrive as integers
// (tensor.data_ptr(), 0 for none), dtypes as _C.F32 / _C.F16 / _C.BF16. device = -1 runs the CPU
// twin. The result is a status (common/status.h). The GIL is released meanwhile.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <type_traits>

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

// The type that a field has on the Python side.
template <class T>
using Wire = std::conditional_t<std::is_pointer_v<T>, std::uintptr_t,
                                std::conditional_t<std::is_enum_v<T>, int, T>>;

template <class T>
T unwire(Wire<T> value) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(value);
  } else {
    return static_cast<T>(value);
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
  return cuda(params, reinterpret_cast<void*>(stream));
#else
  (void)cuda, (void)stream;
  return kNoCuda;
#endif
}

template <class P, class... T>
void bind_op(pybind11::module_& m, const char* name, int (*cuda)(const P&, void*),
             int (*cpu)(const P&), Field<P, T>... fields) {
  m.def(
      name,
      [=](Wire<T>... values, int device, std::uintptr_t stream) {
        P params{};
        ((params.*(fields.member) = unwire<T>(values)), ...);
        return run_op(params, device, stream, cuda, cpu);
      },
      pybind11::kw_only(), pybind11::arg(fields.name)..., pybind11::arg("device"),
      pybind11::arg("stream"));
}

}  // namespace domino
