"""What is predicted beside what is measured: steps on ranks of this machine, and of models on one device."""
