"""The methods, each as its difference from another."""
