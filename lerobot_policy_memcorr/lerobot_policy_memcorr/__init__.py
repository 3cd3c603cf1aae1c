"""MemCorr as a LeRobot plugin: importing this registers the policy and the environments."""

from .configuration_memcorr import MemCorrConfig as MemCorrConfig
from .environment import MemCorrEnvConfig as MemCorrEnvConfig
