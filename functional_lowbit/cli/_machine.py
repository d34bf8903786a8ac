"""What a timing was taken on, in words."""

import platform

import torch


def machine(device: str) -> str:
    """The processor, and how much of it is used."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor()
    threads = torch.get_num_threads()
    return f"{name}, {threads} {'thread' if threads == 1 else 'threads'}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    vector = torch.backends.cpu.get_cpu_capability()
    return f"{names[0] if names else platform.processor() or platform.machine()} ({vector})"
