#include <vector>

#include "common/rows_times.h"
#include "head/project_hidden.h"

namespace domino {

int project_hidden_cpu(const ProjectHiddenParams& p) {
  return dispatch_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    std::vector<float> rows(p.slots * p.width);
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t s = 0; s < p.slots; ++s) {
        const T* row =
            static_cast<const T*>(p.hidden) + b * p.hidden_batch_stride + s * p.hidden_slot_stride;
        for (int64_t k = 0; k < p.width; ++k) rows[s * p.width + k] = to_float(row[k]);
      }
      rows_times(static_cast<const T*>(p.w1), p.w1_stride, p.rank, p.width, rows.data(), p.width,
                 p.slots, p.out + b * p.slots * p.rank, p.rank);
    }
    return static_cast<int>(kOk);
  });
}

}  // namespace domino
