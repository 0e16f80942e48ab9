//! Hooks: what they are called with, panics in them, and calls from inside.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use kvrt::{Error, Hooks, Policy, Pool, PoolOf, Scorer, SharedPool, Threading, Work};

use crate::common::*;

fn with_hooks<T: Threading>(hooks: Hooks, layers: usize) -> PoolOf<T> {
    PoolOf::create_with_hooks(&config(), &model(layers), hooks).unwrap()
}

fn panic_text(body: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(body)).expect_err("this must panic");
    payload.downcast_ref::<&str>().map(|text| text.to_string()).expect("a literal")
}

/// A compression asks for the time.
fn compress(pool: &Pool) -> u64 {
    let sequence = sequence(pool);
    Text::new(SHAPE, 1, 40, 81).run(pool, sequence, 0..40);
    let report = pool.compress(sequence, Some(&Policy::new(Scorer::Streaming, 16))).unwrap();
    report.nanoseconds
}

#[test]
fn the_clock_of_the_host_measures() {
    let _session = Session::new();
    let ticks = AtomicU64::new(1000);
    let hooks = Hooks::new().now(move || ticks.fetch_add(12345, Ordering::Relaxed));
    assert_eq!(compress(&with_hooks(hooks, 1)), 12345);
}

/// What a `parallel_for` hook may look like.
type Executor = fn(&Work);

const EXECUTORS: [(&str, Executor); 6] = [
    ("here", |work| while work.run_one() {}),
    ("on four threads", |work| {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| while work.run_one() {});
            }
        });
    }),
    ("a task for each piece", |work| {
        std::thread::scope(|scope| {
            for _ in 0..work.count() {
                scope.spawn(|| assert!(work.run_one()));
            }
        });
    }),
    ("none of it", |_| {}),
    ("one piece", |work| assert!(work.run_one())),
    ("too much", |work| {
        for _ in 0..work.count() + 1000 {
            work.run_one();
        }
        assert!(!work.run_one());
    }),
];

#[test]
fn every_executor_gives_the_same_bits() {
    let _session = Session::new();
    let text = Text::new(SHAPE, 2, 200, 82);
    let run = |pool: &Pool| text.run(pool, sequence(pool), 0..200);
    let expected = run(&pool(2));
    for (name, executor) in EXECUTORS {
        let calls = Arc::new(AtomicUsize::new(0));
        let counter = calls.clone();
        let hooks = Hooks::new().parallel_for(move |work| {
            counter.fetch_add(1, Ordering::Relaxed);
            executor(work);
        });
        assert!(run(&with_hooks(hooks, 2)) == expected, "{name}");
        assert!(calls.load(Ordering::Relaxed) > 0, "{name}: the hook was not called");
    }
}

#[test]
fn a_panic_in_a_hook_goes_on_when_the_call_returns() {
    let _session = Session::new();
    let armed = Arc::new(AtomicBool::new(false));
    let fires = armed.clone();
    let pool: Pool = with_hooks(
        Hooks::new().now(|| panic!("no clock")).parallel_for(move |work| {
            work.run_one();
            if fires.load(Ordering::Relaxed) {
                panic!("no threads");
            }
        }),
        1,
    );
    let text = Text::new(SHAPE, 1, 40, 83);
    let sequence = sequence(&pool);
    let step = pool.begin_step().unwrap();
    step.append(sequence, 40, None).unwrap();
    step.reserve().unwrap();
    armed.store(true, Ordering::Relaxed);
    let (keys, values) = (dense(&text.keys[0], 40, 2), dense(&text.values[0], 40, 2));
    assert_eq!(panic_text(|| step.write(0, &keys, &values).unwrap()), "no threads");
    armed.store(false, Ordering::Relaxed);
    // The pieces that the hook left were run all the same, and the step goes on.
    let mut out = vec![0.0; 40 * SHAPE.out_row()];
    step.attend(0, &dense(&text.queries[0], 40, 4), &mut dense_mut(&mut out, 40, 4)).unwrap();
    step.end().unwrap();
    text.assert_outputs(0, 0..40, &out, 2e-6, &Rule::default(), causal);

    let policy = Policy::new(Scorer::Streaming, 16);
    let said = panic_text(|| drop(pool.compress(sequence, Some(&policy))));
    assert_eq!(said, "no clock");
    assert_eq!(pool.sequence_layer_info(sequence, 0).unwrap().retained, 16);
    pool.check().unwrap();
}

#[test]
fn a_panic_in_a_thread_of_an_executor_goes_on_too() {
    let _session = Session::new();
    let pool: Pool = with_hooks(
        Hooks::new().parallel_for(|work| {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    work.run_one();
                    panic!("a thread's end");
                });
            });
        }),
        1,
    );
    let text = Text::new(SHAPE, 1, 40, 84);
    let sequence = sequence(&pool);
    let outcome = catch_unwind(AssertUnwindSafe(|| text.run(&pool, sequence, 0..40)));
    assert!(outcome.is_err());
    // The step was dropped while the panic went on, and with that cancelled.
    let stats = pool.counters().pool().unwrap();
    assert_eq!((stats.open_steps, stats.pinned), (0, 0));
}

#[test]
fn a_panicking_allocator_refuses() {
    use std::alloc::{GlobalAlloc, Layout, System};
    struct Panicking(AtomicUsize);
    // SAFETY: the system's allocator, or a panic.
    unsafe impl GlobalAlloc for Panicking {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            assert!(self.0.fetch_add(1, Ordering::Relaxed) < 5, "no memory today");
            System.alloc(layout)
        }
        unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
            System.dealloc(memory, layout);
        }
    }
    let _session = Session::new();
    let hooks = Hooks::new().allocator(Panicking(AtomicUsize::new(0)));
    let said = panic_text(|| {
        Pool::create_with_hooks(&config(), &model(1), hooks).unwrap();
    });
    assert_eq!(said, "no memory today");
}

#[test]
fn a_hook_that_calls_its_own_pool_gets_an_error() {
    let _session = Session::new();
    let own: Arc<OnceLock<std::sync::Weak<SharedPool>>> = Arc::new(OnceLock::new());
    let heard = Arc::new(Mutex::new(Vec::new()));
    let (own_inside, heard_inside) = (own.clone(), heard.clone());
    let hooks = Hooks::new().parallel_for(move |work| {
        let pool = own_inside.get().and_then(std::sync::Weak::upgrade).unwrap();
        heard_inside.lock().unwrap().push(pool.check());
        pool.counters().pool().expect("counters are safe anywhere");
        let other = crate::common::pool(1);
        other.check().expect("another pool may be called");
        while work.run_one() {}
    });
    let pool: Arc<SharedPool> = Arc::new(with_hooks(hooks, 1));
    own.set(Arc::downgrade(&pool)).unwrap();
    let sequence = sequence(&*pool);
    Text::new(SHAPE, 1, 40, 85).run(&pool, sequence, 0..40);
    let heard = heard.lock().unwrap();
    assert!(!heard.is_empty());
    for outcome in heard.iter() {
        assert!(matches!(outcome, Err(Error::Invalid(text)) if text.contains("hook")));
    }
    drop(heard);
    pool.check().expect("outside of the hook the pool can be called");
}

#[test]
fn a_step_that_is_dropped_or_ended_in_a_hook_of_its_pool_stays_open() {
    let _session = Session::new();
    let steps = Arc::new(Mutex::new(Vec::<kvrt::Step<'static, kvrt::Shared>>::new()));
    let verdicts = Arc::new(Mutex::new(Vec::new()));
    let (steps_inside, verdicts_inside) = (steps.clone(), verdicts.clone());
    let hooks = Hooks::new().now(move || {
        let mut steps = steps_inside.lock().unwrap();
        drop(steps.pop());
        verdicts_inside.lock().unwrap().extend(steps.pop().map(kvrt::Step::end));
        0
    });
    let place = Box::into_raw(Box::new(with_hooks::<kvrt::Shared>(hooks, 1)));
    // SAFETY: the pool goes at the end of this test, when no step is left to borrow it.
    let pool: &'static SharedPool = unsafe { &*place };
    let sequence = sequence(pool);
    Text::new(SHAPE, 1, 40, 85).run(pool, sequence, 0..40);
    steps.lock().unwrap().extend([pool.begin_step().unwrap(), pool.begin_step().unwrap()]);
    pool.compress(sequence, Some(&Policy::new(Scorer::Streaming, 16))).unwrap();

    let verdict = verdicts.lock().unwrap().pop().expect("the hook was called");
    assert_error(verdict, kvrt::Status::INVALID, "a hook has called the pool that it belongs to");
    assert!(steps.lock().unwrap().is_empty());
    assert_eq!(pool.counters().pool().unwrap().open_steps, 2);
    assert_error(pool.begin_step(), kvrt::Status::LIMIT, "");
    // SAFETY: the box of above, which nothing borrows any more.
    drop(unsafe { Box::from_raw(place) });
}

#[test]
fn hooks_are_dropped_after_their_pool() {
    let _session = Session::new();
    let alive = Arc::new(());
    let held = alive.clone();
    let pool: Pool = with_hooks(Hooks::new().log(move |_, _| drop(held.clone())), 1);
    assert_eq!(Arc::strong_count(&alive), 2);
    drop(pool);
    assert_eq!(Arc::strong_count(&alive), 1);

    let held = alive.clone();
    let hooks = Hooks::new().log(move |_, _| drop(held.clone()));
    Pool::create_with_hooks(&config().block_tokens(1), &model(1), hooks).unwrap_err();
    assert_eq!(Arc::strong_count(&alive), 1, "also when no pool came of it");
}

#[test]
fn the_log_hears_of_defects() {
    use kvrt::{Layout, LogLevel, TableBuffers};
    let _session = Session::new();
    let lines = Arc::new(Mutex::new(Vec::new()));
    let log = lines.clone();
    let hooks =
        Hooks::new().log(move |level, text| log.lock().unwrap().push((level, text.to_string())));
    let config = config().layout(Layout::Nhd);
    let pool = Pool::create_with_hooks(&config, &model(1), hooks).unwrap();
    let sequence = sequence(&pool);
    let mut step = pool.begin_step().unwrap();
    step.append(sequence, 16, None).unwrap();
    step.reserve().unwrap();
    let mut slots = vec![0; 16];
    let mut buffers = TableBuffers { slot_mapping: Some(&mut slots), ..Default::default() };
    let tables = step.export(0, &mut buffers).unwrap();
    // An own kernel that writes behind its block damages the guard there.
    let first = tables.buffers().slot_mapping.as_ref().unwrap()[0];
    let behind = first / 16 * tables.block_stride() + tables.block_bytes() as i64;
    // SAFETY: in a debug pool guard bytes follow a block; they are put back below.
    let guard = unsafe { tables.base().offset(behind as isize) };
    let was = unsafe { guard.read() };
    unsafe { guard.write(!was) };
    step.end().unwrap();
    let error = pool.check().unwrap_err();
    assert!(matches!(error, Error::Internal(_)), "{error}");
    let heard = lines.lock().unwrap().clone();
    assert_eq!(heard, [(LogLevel::Error, error.message().to_string())]);
    // SAFETY: as above; the pool keeps its arena.
    unsafe { guard.write(was) };
    pool.check().unwrap();
}
