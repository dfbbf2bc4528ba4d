// The table of contents of domino_kernels._C: every op, nothing else. How a call is made up of
// keywords stands in common/bind_op.h, the meaning of each field in the op's own header.
#include <pybind11/pybind11.h>

#include "common/bind_op.h"
#include "common/dtype.h"
#include "head/gru_step.h"

PYBIND11_MODULE(_C, m) {
  using namespace domino;
  m.doc() = "CUDA kernels and their CPU twins; use the public functions of domino_kernels";
  m.attr("F32") = static_cast<int>(DType::kF32);
  m.attr("F16") = static_cast<int>(DType::kF16);
  m.attr("BF16") = static_cast<int>(DType::kBF16);
  m.def("status_name", &status_name, pybind11::arg("status"));
  m.def("status_text", &status_text, pybind11::arg("status"));

  bind_op<GruStepParams>(
      m, "gru_step", DOMINO_CUDA_LAUNCHER(gru_step_cuda), gru_step_cpu,
      field("out", &GruStepParams::out), field("x", &GruStepParams::x),
      field("state", &GruStepParams::state), field("w_ih", &GruStepParams::w_ih),
      field("w_hh", &GruStepParams::w_hh), field("batch", &GruStepParams::batch),
      field("inputs", &GruStepParams::inputs), field("units", &GruStepParams::units),
      field("out_stride", &GruStepParams::out_stride), field("x_stride", &GruStepParams::x_stride),
      field("state_stride", &GruStepParams::state_stride), field("dtype", &GruStepParams::dtype));
}
