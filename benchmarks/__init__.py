"""Measurements, peers, plots and the simulator."""
