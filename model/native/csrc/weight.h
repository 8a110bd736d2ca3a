// A packed weight as Python holds it.
#pragma once

#include <torch/custom_class.h>

#include "linear.h"
#include "tensors.h"

namespace headroom {

// A weight in panels (linear.h), with its bias in fp32, padded as the panels are. With scales, the panels are
// int32 lanes of codes (quantised.h), and it takes bfloat16 inputs.
struct Weight : torch::CustomClassHolder {
  Weight(Tensor panels, optional<Tensor> bias, int64_t outputs, int64_t inputs, optional<Tensor> scales)
      : panels(std::move(panels)), bias(std::move(bias)), outputs(outputs), inputs(inputs), scales(std::move(scales)) {
    const int64_t padded = (outputs + kLanes - 1) / kLanes * kLanes;
    if (this->scales.has_value()) {
      check_codes(padded);
    } else {
      require(is_plain(this->panels) && this->panels.numel() == padded * inputs, "panels of the wrong size");
      require(inputs * this->panels.itemsize() % 4 == 0, "inputs must be a multiple of a lane's");
    }
    if (this->bias.has_value()) {
      require(is_plain(*this->bias) && this->bias->scalar_type() == at::kFloat && this->bias->numel() == padded,
              "a bias must be padded float32");
    }
  }

  void check_codes(int64_t padded) const {
    require(is_plain(panels) && panels.scalar_type() == at::kInt && is_plain(*scales) &&
                scales->scalar_type() == at::kBFloat16 && inputs % kGroup == 0,
            "codes must be int32 lanes with bfloat16 scales, in whole groups");
    const int64_t groups = padded * (inputs / kGroup);
    require(panels.numel() == groups * (four_bits() ? 4 : 8), "codes of the wrong size");
    require(scales->numel() == groups * (four_bits() ? 2 : 1), "scales of the wrong size");
  }

  bool four_bits() const { return scales->numel() == padded_groups() * 2; }
  int64_t padded_groups() const { return (outputs + kLanes - 1) / kLanes * kLanes * (inputs / kGroup); }

  template <class T>
  Projection<T> view() const {
    const uint32_t* lanes = data<const uint32_t>(panels);
    if constexpr (std::is_same_v<T, bf16>) {
      const bf16* factors = data<bf16>(scales);
      if (factors != nullptr && four_bits()) {
        return {QuantisedPanels<Codes4>{lanes, factors, outputs, inputs}, data<float>(bias)};
      }
      if (factors != nullptr) return {QuantisedPanels<Codes8>{lanes, factors, outputs, inputs}, data<float>(bias)};
    }
    return {Panels<T>{lanes, outputs, inputs}, data<float>(bias)};
  }

  at::ScalarType dtype() const { return scales.has_value() ? at::kBFloat16 : panels.scalar_type(); }

  Tensor panels;
  optional<Tensor> bias;
  int64_t outputs, inputs;
  optional<Tensor> scales;
};

using WeightPtr = c10::intrusive_ptr<Weight>;

}  // namespace headroom
