//! The one thread of a process that calls the tensor library.
//!
//! Parallelism inside a call is the library's own pool; two callers at once would only fight over it. Jobs run in the
//! order they come. A job that panics is an error for its caller, and the thread goes on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;

use tokio::sync::oneshot;

use crate::Error;

type Job = Box<dyn FnOnce() + Send>;

/// Jobs that may wait for the thread; callers hold back beyond that.
const WAITING_JOBS: usize = 64;

/// A handle to the compute thread; clones share it. The thread ends when the last handle is gone.
#[derive(Clone, Debug)]
pub struct Compute {
    jobs: mpsc::SyncSender<Job>,
}

impl Compute {
    /// Starts the thread.
    pub fn start() -> Result<Self, Error> {
        let (jobs, waiting) = mpsc::sync_channel::<Job>(WAITING_JOBS);
        std::thread::Builder::new()
            .name("compute".to_owned())
            .spawn(move || {
                let _no_gradients = tch::no_grad_guard();
                for job in waiting {
                    job();
                }
            })
            .map_err(|error| Error::Compute(format!("cannot start: {error}")))?;
        Ok(Self { jobs })
    }

    /// Runs `job` on the thread and waits for its value. When the caller stops waiting, the job still runs.
    pub async fn run<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> Result<R, Error> {
        let (sender, receiver) = oneshot::channel();
        let mut job: Job = Box::new(move || drop(sender.send(catch(job))));
        // The queue is nearly always empty: waiting for a place is a poll now and then, not a blocked thread.
        loop {
            match self.jobs.try_send(job) {
                Ok(()) => break,
                Err(mpsc::TrySendError::Full(back)) => {
                    job = back;
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
                Err(mpsc::TrySendError::Disconnected(_)) => return Err(gone()),
            }
        }
        receiver.await.map_err(|_| gone())?
    }

    /// As [`Compute::run`], for callers outside an async runtime.
    pub fn run_blocking<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> Result<R, Error> {
        let (sender, receiver) = oneshot::channel();
        self.jobs.send(Box::new(move || drop(sender.send(catch(job))))).map_err(|_| gone())?;
        receiver.blocking_recv().map_err(|_| gone())?
    }
}

fn gone() -> Error {
    Error::Compute("has stopped".to_owned())
}

fn catch<R>(job: impl FnOnce() -> R) -> Result<R, Error> {
    catch_unwind(AssertUnwindSafe(job)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Error::Compute(format!("job panicked: {}", text.unwrap_or("no message")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_job_that_panics_is_an_error_and_the_next_one_runs() {
        let compute = Compute::start().unwrap();
        let failed = compute.run(|| -> u32 { panic!("seven") }).await.unwrap_err();
        assert!(failed.to_string().contains("seven"), "{failed}");
        assert_eq!(compute.run(|| 8).await.unwrap(), 8);
    }
}
