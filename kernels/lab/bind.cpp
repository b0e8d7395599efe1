#include "bind.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

#include "forwarder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace qccl::lab {

namespace {

using Taken = std::tuple<std::uint64_t, std::uint32_t, std::uint32_t, double, bool>;

Network make_network(const std::vector<std::tuple<double, double, double, double>>& sites, std::uint64_t seed,
                     std::uintptr_t counters) {
  std::vector<Network::Ends> ends;
  for (const auto& [up, up_queue, down, down_queue] : sites) ends.push_back({{up, up_queue}, {down, down_queue}});
  return Network(std::move(ends), seed, reinterpret_cast<Counters*>(counters));
}

std::optional<Taken> take(Network& network, double now) {
  Outcome out{};
  if (!network.take(now, out)) return std::nullopt;
  return Taken(out.tag, out.from, out.to, out.time, out.arrived);
}

}  // namespace

void bind_lab(nb::module_& m) {
  nb::class_<Network>(m, "LabNetwork", "A model of a network between sites; ``counters`` is an address.")
      .def("__init__",
           [](Network* self, const std::vector<std::tuple<double, double, double, double>>& sites, std::uint64_t seed,
              std::uintptr_t counters) { new (self) Network(make_network(sites, seed, counters)); },
           "sites"_a, "seed"_a, "counters"_a)
      .def("set_path", &Network::set_path, "source"_a, "to"_a, "delay"_a, "jitter"_a, "loss"_a)
      .def("send",
           [](Network& network, std::uint32_t from, std::uint32_t to, std::size_t nbytes, double now,
              std::uint64_t tag) { return network.send(from, to, nbytes, now, tag) == Fate::queued; },
           "source"_a, "to"_a, "nbytes"_a, "now"_a, "tag"_a)
      .def("take", &take, "now"_a)
      .def("next", &Network::next);
#ifdef __linux__
  nb::class_<Forwarder>(m, "LabForwarder", "Forwards packets between interfaces, through a LabNetwork.")
      .def("__init__",
           [](Forwarder* self, const std::vector<std::string>& interfaces, Network& network, std::uintptr_t lapses,
              double grain) { new (self) Forwarder(interfaces, network, *reinterpret_cast<Lapses*>(lapses), grain); },
           "interfaces"_a, "network"_a, "lapses"_a, "grain"_a, nb::keep_alive<1, 3>())
      .def("run", &Forwarder::run, "stop"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "lab_port_address",
      [](std::uint32_t port) {
        const std::vector<std::uint8_t> address = port_address(port);
        return nb::bytes(reinterpret_cast<const char*>(address.data()), address.size());
      },
      "port"_a);
#endif
}

}  // namespace qccl::lab
