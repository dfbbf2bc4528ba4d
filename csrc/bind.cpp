// The table of contents of domino_kernels._C: every op, nothing else. How a call is made up of
// keywords stands in common/bind_op.h, the meaning of each field in the op's own header.
#include <pybind11/pybind11.h>

#include "common/bind_op.h"
#include "common/dtype.h"
#include "head/draft_chain.h"
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

  bind_op<DraftChainParams>(
      m, "draft_chain", [](const DraftChainParams&, void*) -> int { return kNoCuda; },
      draft_chain_cpu, field("tokens", &DraftChainParams::tokens),
      field("scores", &DraftChainParams::scores), field("workspace", &DraftChainParams::workspace),
      field("base_logits", &DraftChainParams::base_logits),
      field("hidden", &DraftChainParams::hidden), field("anchor", &DraftChainParams::anchor),
      field("w_ih", &DraftChainParams::w_ih), field("w_hh", &DraftChainParams::w_hh),
      field("w1", &DraftChainParams::w1), field("w2", &DraftChainParams::w2),
      field("embedding", &DraftChainParams::embedding), field("batch", &DraftChainParams::batch),
      field("drafts", &DraftChainParams::drafts),
      field("first_slot", &DraftChainParams::first_slot),
      field("prefix", &DraftChainParams::prefix), field("vocab", &DraftChainParams::vocab),
      field("inputs", &DraftChainParams::inputs), field("units", &DraftChainParams::units),
      field("rank", &DraftChainParams::rank),
      field("base_batch_stride", &DraftChainParams::base_batch_stride),
      field("base_slot_stride", &DraftChainParams::base_slot_stride),
      field("hidden_batch_stride", &DraftChainParams::hidden_batch_stride),
      field("hidden_slot_stride", &DraftChainParams::hidden_slot_stride),
      field("dtype", &DraftChainParams::dtype), field("base_dtype", &DraftChainParams::base_dtype));
  m.def(
      "draft_chain_workspace",
      [](int64_t batch, int64_t drafts, int64_t units, int64_t rank) {
        return DraftChainWorkspace(batch, drafts, units, rank).bytes;
      },
      pybind11::kw_only(), pybind11::arg("batch"), pybind11::arg("drafts"), pybind11::arg("units"),
      pybind11::arg("rank"));
}
