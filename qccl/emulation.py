"""The compiled part of ``qccl-bench``'s lab: a model of a network, and the forwarder that passes packets through it."""

from __future__ import annotations

from qccl import _host

__all__ = ["Forwarder", "NetworkModel", "port_address"]

NetworkModel = _host.LabNetwork
Forwarder = _host.LabForwarder
port_address = _host.lab_port_address
