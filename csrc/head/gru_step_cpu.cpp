#include "common/dot_cpu.h"
#include "head/gru_cell.h"
#include "head/gru_step.h"

namespace domino {

namespace {

template <class T>
int run(const GruStepParams& p) {
  const int64_t inputs = p.inputs, units = p.units;
  for (int64_t b = 0; b < p.batch; ++b) {
    const T* x = static_cast<const T*>(p.x) + b * p.x_stride;
    const T* state = static_cast<const T*>(p.state) + b * p.state_stride;
    T* out = static_cast<T*>(p.out) + b * p.out_stride;
    for (int64_t unit = 0; unit < units; ++unit) {
      const auto of_x = [&](int gate) {
        return dot(static_cast<const T*>(p.w_ih) + (gate * units + unit) * inputs, x, inputs);
      };
      const auto of_state = [&](int gate) {
        return dot(static_cast<const T*>(p.w_hh) + (gate * units + unit) * units, state, units);
      };
      const float next = gru_cell(of_x(0) + of_state(0), of_x(1) + of_state(1), of_x(2),
                                  of_state(2), to_float(state[unit]));
      out[unit] = from_float<T>(next);
    }
  }
  return kOk;
}

}  // namespace

int gru_step_cpu(const GruStepParams& p) {
  return dispatch_dtype(p.dtype, [&](auto tag) { return run<decltype(tag)>(p); });
}

}  // namespace domino
