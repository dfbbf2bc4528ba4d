// The two ops that take lists of tensors, which common/bind_op.h does not.
#pragma once

#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

#include "common/bind_op.h"
#include "tree/accepted_path.h"

namespace domino {

inline void bind_accepted_path(pybind11::module_& m) {
  namespace py = pybind11;
  using Pointers = std::vector<std::uintptr_t>;
  using Sizes = std::vector<int64_t>;
  m.def(
      "compact_accepted",
      [](std::uintptr_t path, std::uintptr_t num_accepted, int64_t batch, int64_t width,
         int64_t nodes, const Pointers& inputs, const Pointers& outputs, const Sizes& bytes,
         const Sizes& batch_strides, const Sizes& node_strides, int device, std::uintptr_t stream) {
        CompactParams p{};
        p.path = {reinterpret_cast<const int32_t*>(path),
                  reinterpret_cast<const int32_t*>(num_accepted), batch, width, nodes};
        if (inputs.size() > kMaxCompactTensors) return static_cast<int>(kBadArgument);
        p.count = static_cast<int>(inputs.size());
        for (int t = 0; t < p.count; ++t)
          p.tensors[t] = {reinterpret_cast<const char*>(inputs[t]),
                          reinterpret_cast<char*>(outputs.at(t)), bytes.at(t), batch_strides.at(t),
                          node_strides.at(t)};
        return run_op<CompactParams>(p, device, stream, DOMINO_CUDA_LAUNCHER(compact_accepted_cuda),
                                     compact_accepted_cpu);
      },
      py::kw_only(), py::arg("path"), py::arg("num_accepted"), py::arg("batch"), py::arg("width"),
      py::arg("nodes"), py::arg("inputs"), py::arg("outputs"), py::arg("bytes"),
      py::arg("batch_strides"), py::arg("node_strides"), py::arg("device"), py::arg("stream"));
  m.def(
      "kv_move",
      [](std::uintptr_t path, std::uintptr_t num_accepted, std::uintptr_t start,
         std::uintptr_t page_table, int64_t batch, int64_t width, int64_t pages, int64_t page_size,
         int64_t page_count, int64_t slots, int64_t heads, int64_t bytes, int64_t batch_stride,
         int64_t slot_stride, int64_t head_stride, const Pointers& caches, int device,
         std::uintptr_t stream) {
        MoveParams p{};
        p.path = {reinterpret_cast<const int32_t*>(path),
                  reinterpret_cast<const int32_t*>(num_accepted), batch, width, INT32_MAX};
        p.start = reinterpret_cast<const int64_t*>(start);
        p.page_table = reinterpret_cast<const int32_t*>(page_table);
        p.pages = pages;
        p.page_size = page_size;
        p.page_count = page_count;
        p.slots = slots;
        p.heads = heads;
        p.bytes = bytes;
        p.batch_stride = batch_stride;
        p.slot_stride = slot_stride;
        p.head_stride = head_stride;
        for (size_t first = 0; first < caches.size(); first += kMaxMoveTensors) {
          p.count = static_cast<int>(std::min<size_t>(kMaxMoveTensors, caches.size() - first));
          for (int t = 0; t < p.count; ++t)
            p.caches[t] = reinterpret_cast<char*>(caches[first + t]);
          const int status = run_op<MoveParams>(p, device, stream,
                                                DOMINO_CUDA_LAUNCHER(kv_move_cuda), kv_move_cpu);
          if (status != kOk) return status;
        }
        return static_cast<int>(kOk);
      },
      py::kw_only(), py::arg("path"), py::arg("num_accepted"), py::arg("start"),
      py::arg("page_table"), py::arg("batch"), py::arg("width"), py::arg("pages"),
      py::arg("page_size"), py::arg("page_count"), py::arg("slots"), py::arg("heads"),
      py::arg("bytes"), py::arg("batch_stride"), py::arg("slot_stride"), py::arg("head_stride"),
      py::arg("caches"), py::arg("device"), py::arg("stream"));
}

}  // namespace domino
