"""Statistics of the scheduler: buckets, gradients that were given back, bytes, elements, and seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class OverlapStatistics:
    """Counts of a scheduler since it was made; what became of speculation is in `superadam.Statistics`, by parameter.

    Attributes:
        buckets: handed to the worker.
        resident_buckets: whose gradients and state are on the device, where the step is made with the verdict.
        waiting_buckets: only summed when they arrived, and stepped with the verdict: because no clip coefficient could
            be predicted, their parameters had no state yet or were written to by others, or are their own masters.
        given_back_gradients: written to or added to after they had been taken.
        shadow_bytes: most memory that new values took while they waited for a verdict or for a copy.
        downloaded_bytes, uploaded_bytes: moved between host and device; 0 for models in host memory. What the device
            reads on the host, as new values without room there, is not counted.
        interval_elements: speculated on for an interval of clip coefficients.
        uncertain_elements: of those, elements whose new value the verdict's coefficient decides.
        hook_seconds: time that taking gradients took, in the hooks of backward and, of the last ones, in `step()`.
        worker_seconds: time in which the worker worked.
        waited_seconds: time in which the training thread waited for the worker, in `step()` and in readers of state.
        step_seconds: time that `step()` took after the worker was done.
    """

    buckets: int = 0
    resident_buckets: int = 0
    waiting_buckets: int = 0
    given_back_gradients: int = 0
    shadow_bytes: int = 0
    downloaded_bytes: int = 0
    uploaded_bytes: int = 0
    interval_elements: int = 0
    uncertain_elements: int = 0
    hook_seconds: float = 0.0
    worker_seconds: float = 0.0
    waited_seconds: float = 0.0
    step_seconds: float = 0.0

    @property
    def speculated_buckets(self) -> int:
        """Buckets that were speculated on when they arrived, or have not arrived yet."""
        return self.buckets - self.resident_buckets - self.waiting_buckets

    @property
    def hidden_seconds(self) -> float:
        """Time in which the worker worked and training did not wait for it."""
        return max(0.0, self.worker_seconds - self.waited_seconds)

    @property
    def work_seconds(self) -> float:
        """Time of all of the optimizer's work: hidden, waited for, in hooks and in `step()`."""
        return self.hidden_seconds + self.waited_seconds + self.hook_seconds + self.step_seconds

    @property
    def hidden_share(self) -> float:
        """Share of all of the optimizer's work, in worker, hooks and `step()`, that was hidden; 0 before any work."""
        return self.hidden_seconds / self.work_seconds if self.hidden_seconds else 0.0
