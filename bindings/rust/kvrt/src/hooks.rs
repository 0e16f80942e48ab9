//! Hooks: closures of the host that a pool calls from inside the library.
//!
//! A panic in a closure is caught before it reaches C and goes on when the call that led to it
//! returns. A closure must not call the pool that it belongs to: on the thread that is inside a
//! call, that is an error, and a step that is dropped or ended there stays open until the pool is
//! gone; on others, such as the workers of `parallel_for`, it waits for that call forever.

use std::alloc::{GlobalAlloc, Layout};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{c_char, c_void};
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

use kvrt_sys as sys;

use crate::{Error, LogLevel, Result};

type Log = Box<dyn Fn(LogLevel, &str) + Send + Sync>;
type Now = Box<dyn Fn() -> u64 + Send + Sync>;
type ParallelFor = Box<dyn Fn(&Work) + Send + Sync>;

/// Functions of the host for one pool. Each is optional. They live as long as the pool.
#[derive(Default)]
pub struct Hooks {
    allocator: Option<Box<dyn GlobalAlloc + Send + Sync>>,
    log: Option<Log>,
    now: Option<Now>,
    parallel_for: Option<ParallelFor>,
}

impl Hooks {
    pub fn new() -> Self {
        Hooks::default()
    }

    /// All host memory of the pool but the arena. Called when the pool is created and dropped.
    #[must_use]
    pub fn allocator(mut self, allocator: impl GlobalAlloc + Send + Sync + 'static) -> Self {
        self.allocator = Some(Box::new(allocator));
        self
    }

    /// Takes one line of text without its newline, from any thread that is inside a call.
    #[must_use]
    pub fn log(mut self, log: impl Fn(LogLevel, &str) + Send + Sync + 'static) -> Self {
        self.log = Some(Box::new(log));
        self
    }

    /// Monotonic nanoseconds, for the times in reports.
    #[must_use]
    pub fn now(mut self, now: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        self.now = Some(Box::new(now));
        self
    }

    /// Runs the library's parallel work on the host's threads, instead of on the library's own.
    /// Results do not depend on it.
    #[must_use]
    pub fn parallel_for(mut self, run: impl Fn(&Work) + Send + Sync + 'static) -> Self {
        self.parallel_for = Some(Box::new(run));
        self
    }

    /// Fixes the closures at an address that C may keep.
    pub(crate) fn into_shared(self) -> Arc<Hooks> {
        Arc::new(self)
    }

    /// The raw struct, whose user pointer is valid as long as `self` is.
    pub(crate) fn lend(self: &Arc<Self>) -> sys::kv_hooks {
        let allocates = self.allocator.is_some();
        sys::kv_hooks {
            user: Arc::as_ptr(self) as *mut c_void,
            allocate: allocates.then_some(allocate as sys::kv_allocate_hook),
            release: allocates.then_some(release as sys::kv_release_hook),
            log: self.log.as_ref().map(|_| log as sys::kv_log_hook),
            now: self.now.as_ref().map(|_| now as sys::kv_now_hook),
            parallel_for: self.parallel_for.as_ref().map(|_| parallel_for as _),
            ..Default::default()
        }
    }

    /// A closure of these hooks that calls their pool would meet itself.
    pub(crate) fn refuse_call_from_inside(&self) -> Result<()> {
        let own = self as *const Hooks as usize;
        let inside = INSIDE.try_with(|inside| inside.borrow().contains(&own)).unwrap_or(false);
        if inside {
            let text = "a hook has called the pool that it belongs to, from inside a call";
            return Err(Error::Invalid(text.to_string()));
        }
        Ok(())
    }
}

/// Work that a `parallel_for` hook must get done: `count` pieces, in any order, on any threads.
/// What the hook leaves is run after it, on its thread.
pub struct Work {
    count: u32,
    next: AtomicU32,
    body: sys::kv_parallel_body,
    context: *mut c_void,
}

// SAFETY: kvrt.h allows the body on any threads, once for every index; `next` gives each out once.
unsafe impl Sync for Work {}

impl Work {
    /// How many pieces there are.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Runs the next piece that nobody has taken; false when there is none.
    pub fn run_one(&self) -> bool {
        // The look beforehand keeps `next` from ever wrapping round.
        if self.next.load(Ordering::Relaxed) >= self.count {
            return false;
        }
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        if index >= self.count {
            return false;
        }
        // SAFETY: the library waits for all indices before body and context end, and `&self` does
        // not outlive that wait.
        unsafe { (self.body)(self.context, index) };
        true
    }
}

thread_local! {
    /// Whose hooks are running on this thread, the innermost last.
    static INSIDE: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// The first panic of a hook since this thread's last call began.
    static PANIC: RefCell<Option<Box<dyn Any + Send>>> = const { RefCell::new(None) };
}

/// Goes on with a panic that a hook caught on this thread. Not during another panic, which a
/// second one would turn into an abort.
pub(crate) fn resume_panic() {
    let panic = PANIC.try_with(|panic| panic.borrow_mut().take()).ok().flatten();
    if let Some(panic) = panic {
        if !std::thread::panicking() {
            resume_unwind(panic);
        }
    }
}

/// Runs a hook's closure; `refusal` is what C gets when it panics.
///
/// # Safety
/// `user` is the pointer that `Hooks::lend` gave out, and the hooks are still alive.
unsafe fn run<R>(user: *mut c_void, refusal: R, body: impl FnOnce(&Hooks) -> R) -> R {
    let hooks = &*user.cast::<Hooks>();
    let _ = INSIDE.try_with(|inside| inside.borrow_mut().push(user as usize));
    let outcome = catch_unwind(AssertUnwindSafe(|| body(hooks)));
    let _ = INSIDE.try_with(|inside| inside.borrow_mut().pop());
    outcome.unwrap_or_else(|panic| {
        let _ = PANIC.try_with(|first| {
            first.borrow_mut().get_or_insert(panic);
        });
        refusal
    })
}

unsafe extern "C" fn allocate(user: *mut c_void, bytes: usize, alignment: usize) -> *mut c_void {
    run(user, null_mut(), |hooks| {
        match (&hooks.allocator, Layout::from_size_align(bytes, alignment)) {
            // SAFETY: the size is not zero.
            (Some(allocator), Ok(layout)) if bytes > 0 => unsafe { allocator.alloc(layout) }.cast(),
            _ => null_mut(),
        }
    })
}

unsafe extern "C" fn release(
    user: *mut c_void,
    memory: *mut c_void,
    bytes: usize,
    alignment: usize,
) {
    run(user, (), |hooks| {
        if let (Some(allocator), Ok(layout)) =
            (&hooks.allocator, Layout::from_size_align(bytes, alignment))
        {
            // SAFETY: the library gives back what `allocate` gave out, with the same layout.
            unsafe { allocator.dealloc(memory.cast(), layout) }
        }
    })
}

unsafe extern "C" fn log(user: *mut c_void, level: i32, text: *const c_char, length: usize) {
    run(user, (), |hooks| {
        // SAFETY: the library lends `length` bytes for the time of this call.
        let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
        if let Some(log) = &hooks.log {
            log(LogLevel::from(level), &String::from_utf8_lossy(bytes));
        }
    })
}

unsafe extern "C" fn now(user: *mut c_void) -> u64 {
    run(user, 0, |hooks| hooks.now.as_ref().map_or(0, |now| now()))
}

unsafe extern "C" fn parallel_for(
    user: *mut c_void,
    count: u32,
    body: sys::kv_parallel_body,
    context: *mut c_void,
) {
    let work = Work { count, next: AtomicU32::new(0), body, context };
    run(user, (), |hooks| {
        if let Some(parallel_for) = &hooks.parallel_for {
            parallel_for(&work);
        }
    });
    while work.run_one() {}
}
