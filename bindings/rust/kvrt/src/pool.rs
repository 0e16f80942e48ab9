//! Pools, and from which threads they may be called.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::{null_mut, NonNull};
use std::sync::Arc;

use kvrt_sys as sys;

use crate::error::check;
use crate::hooks::resume_panic;
use crate::{Counters, Error, Hooks, Model, PoolConfig, Result};

mod sealed {
    pub trait Sealed {}
}

/// Which threads may call a pool at once: [`Serial`] or [`Shared`].
pub trait Threading: sealed::Sealed {
    #[doc(hidden)]
    const FLAGS: u32;
}

/// One thread at a time: the pool can be sent to another thread, and is not `Sync`.
#[derive(Debug)]
pub struct Serial(PhantomData<Cell<()>>);

/// Any threads at once: a lock inside the library orders their calls.
#[derive(Debug)]
pub struct Shared(());

impl sealed::Sealed for Serial {}
impl sealed::Sealed for Shared {}

impl Threading for Serial {
    const FLAGS: u32 = 0;
}

impl Threading for Shared {
    const FLAGS: u32 = sys::KV_POOL_THREAD_SAFE;
}

/// A pool that one thread calls at a time.
pub type Pool = PoolOf<Serial>;

/// A pool that any threads call at once.
pub type SharedPool = PoolOf<Shared>;

/// The keys and values of all sequences of one model on one device. [`Pool`] and [`SharedPool`] are
/// its two kinds. Dropping it ends all its sequences; steps and views borrow it, so none is left.
///
/// A plain pool is not called by two threads at once:
///
/// ```compile_fail,E0277
/// fn needs_sync<T: Sync>() {}
/// needs_sync::<kvrt::Pool>();
/// ```
///
/// and its steps stay on their thread:
///
/// ```compile_fail,E0277
/// fn needs_send<T: Send>() {}
/// needs_send::<kvrt::Step<'static, kvrt::Serial>>();
/// ```
///
/// A step does not outlive its pool:
///
/// ```compile_fail,E0505
/// # fn f(pool: kvrt::Pool) -> kvrt::Result<()> {
/// let step = pool.begin_step()?;
/// drop(pool);
/// step.cancel()?;
/// # Ok(())
/// # }
/// ```
///
/// and a step that has ended is gone:
///
/// ```compile_fail,E0382
/// # fn f(pool: kvrt::Pool) -> kvrt::Result<()> {
/// let step = pool.begin_step()?;
/// step.cancel()?;
/// step.end()?;
/// # Ok(())
/// # }
/// ```
pub struct PoolOf<T: Threading> {
    raw: NonNull<sys::kv_pool>,
    hooks: Option<Arc<Hooks>>,
    on_cuda: bool,
    threading: PhantomData<T>,
}

// SAFETY: kvrt.h: calls may come from any thread, one at a time. Who owns the pool, or borrows it
// where it is not `Sync`, is alone with it.
unsafe impl<T: Threading> Send for PoolOf<T> {}
// SAFETY: kvrt.h: KV_POOL_THREAD_SAFE turns *external* calls into *safe* ones.
unsafe impl Sync for PoolOf<Shared> {}

impl<T: Threading> PoolOf<T> {
    /// Creates a pool for one model. Errors: Invalid, Unsupported, TooLarge, NoMemory.
    pub fn create(config: &PoolConfig, model: &Model) -> Result<Self> {
        Self::create_raw(config, model, None, |config, model, out| {
            // SAFETY: `create_raw` passes valid structs.
            unsafe { sys::kv_pool_create(config, model, out) }
        })
    }

    /// Creates a pool that calls closures of the host; they are dropped after the pool.
    pub fn create_with_hooks(config: &PoolConfig, model: &Model, hooks: Hooks) -> Result<Self> {
        Self::create_raw(config, model, Some(hooks.into_shared()), |config, model, out| {
            // SAFETY: `create_raw` passes valid structs.
            unsafe { sys::kv_pool_create(config, model, out) }
        })
    }

    /// `create` gets a config and a model whose arrays live until it returns, and hooks that live
    /// as long as the pool: `self` holds them, and drops them last.
    pub(crate) fn create_raw(
        config: &PoolConfig,
        model: &Model,
        hooks: Option<Arc<Hooks>>,
        create: impl FnOnce(
            &sys::kv_pool_config,
            *const sys::kv_model,
            &mut *mut sys::kv_pool,
        ) -> sys::kv_status,
    ) -> Result<Self> {
        let model = model.lend()?;
        let raw_hooks = hooks.as_ref().map(Hooks::lend);
        let config = config.lend(T::FLAGS, raw_hooks.as_ref());
        let mut raw = null_mut();
        let verdict = check(create(&config, model.as_ptr(), &mut raw));
        let pool = verdict.and_then(|()| match NonNull::new(raw) {
            Some(raw) => {
                let on_cuda = config.device == sys::KV_DEVICE_CUDA;
                Ok(PoolOf { raw, hooks, on_cuda, threading: PhantomData })
            }
            None => Err(Error::Internal("kv_pool_create gave no pool".to_string())),
        });
        resume_panic();
        pool
    }

    /// Its tensors and blocks are in device memory.
    pub(crate) fn on_cuda(&self) -> bool {
        self.on_cuda
    }

    /// Makes a call on this pool. Every call that kvrt.h names *external* goes through here.
    pub(crate) fn call(
        &self,
        body: impl FnOnce(*mut sys::kv_pool) -> sys::kv_status,
    ) -> Result<()> {
        match &self.hooks {
            None => check(body(self.raw.as_ptr())),
            Some(hooks) => {
                hooks.refuse_call_from_inside()?;
                let verdict = check(body(self.raw.as_ptr()));
                resume_panic();
                verdict
            }
        }
    }

    /// All steps with a fence number up to `fence` have been read to the end by the host's kernels.
    /// Errors: Invalid (no host fences, a step still open or not begun).
    pub fn pass_fence(&self, fence: u64) -> Result<()> {
        // SAFETY: the pool is alive.
        self.call(|pool| unsafe { sys::kv_pool_pass_fence(pool, fence) })
    }

    /// Walks everything, for tests and for hunting defects. Slow. Errors: Internal with what was
    /// found.
    pub fn check(&self) -> Result<()> {
        // SAFETY: the pool is alive.
        self.call(|pool| unsafe { sys::kv_pool_check(pool) })
    }

    /// The counters, which any thread may read at any time, also those of a pool that is not
    /// `Sync`.
    pub fn counters(&self) -> Counters<'_> {
        Counters::new(self.raw, PhantomData)
    }
}

impl<T: Threading> Drop for PoolOf<T> {
    fn drop(&mut self) {
        // SAFETY: whoever drops the pool is alone with it, so no call is inside, and nothing that
        // borrowed it is left.
        unsafe { sys::kv_pool_release(self.raw.as_ptr()) };
        if self.hooks.is_some() {
            resume_panic();
        }
    }
}

impl<T: Threading> fmt::Debug for PoolOf<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Pool").field("address", &self.raw).finish_non_exhaustive()
    }
}
