//! Running out: blocks, limits, memory. And asking beforehand.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use kvrt::{Category, Error, Format, Hooks, Pool, PoolConfig, ReserveReport, Sequence, Status};

use crate::common::*;

/// A block of `SHAPE` in f32: 16 tokens, K and V, 2 heads of 32.
const BLOCK_BYTES: u64 = 16 * 2 * 2 * 32 * 4;
/// Blocks of one slab of 2 MiB.
const SLAB_BLOCKS: u64 = (2 << 20) / BLOCK_BYTES;

/// One slab, which `SLAB_BLOCKS` blocks fill.
fn small() -> PoolConfig {
    PoolConfig::new(2 << 20)
        .max_sequences(4)
        .max_tokens_per_sequence(8192)
        .max_step_tokens(8192)
        .threads(1)
}

fn prefill(pool: &Pool, sequence: Sequence, tokens: usize) -> kvrt::Result<()> {
    let step = pool.begin_step()?;
    step.append(sequence, tokens as u32, None)?;
    step.reserve()?;
    Text::new(SHAPE, 1, tokens, 41).pass(&step, 0..tokens);
    step.end().map(drop)
}

#[test]
fn blocks_that_will_come_back_are_again() {
    let _session = Session::new();
    let pool: Pool = create(&small(), 1);
    let (a, b, c) = (sequence(&pool), sequence(&pool), sequence(&pool));
    let half = SLAB_BLOCKS as usize / 2 * 16;
    prefill(&pool, a, half).unwrap();

    let step = pool.begin_step().unwrap();
    step.append(b, 16, None).unwrap();
    step.append(c, half as u32, None).unwrap();
    let mut report = ReserveReport::with_item_statuses(3);
    let error = step.reserve_with(&mut report).unwrap_err();
    assert!(matches!(error, Error::Again(_)), "{error}");
    assert_eq!(error.category(), Category::Capacity);
    assert_eq!(report.need_blocks, SLAB_BLOCKS / 2 + 1);
    assert_eq!(report.need_bytes, (SLAB_BLOCKS / 2 + 1) * BLOCK_BYTES);
    assert_eq!(report.free_bytes_now, SLAB_BLOCKS / 2 * BLOCK_BYTES);
    assert_eq!(report.free_bytes_after_fence, report.free_bytes_now);
    assert_eq!(report.items_that_fit, 1);
    assert_eq!(report.item_statuses(), [Status::OK, Status::AGAIN, Status::OK]);

    // The sequence that stands in the way goes, and the same step is reserved.
    assert_error(step.reserve(), Status::AGAIN, "blocks");
    pool.release_sequence(a).unwrap();
    step.reserve_with(&mut report).unwrap();
    assert_eq!(report.items_that_fit, 2);
    assert_eq!(report.item_statuses(), [Status::OK; 3]);
    let mut none = ReserveReport::default();
    assert_error(step.reserve_with(&mut none), Status::INVALID, "reserved already");
}

#[test]
fn what_never_fits_is_too_large() {
    let _session = Session::new();
    let pool: Pool = create(&small(), 1);
    let sequence = sequence(&pool);
    let too_many = (SLAB_BLOCKS as usize + 1) * 16;
    let outcome = prefill(&pool, sequence, too_many);
    assert!(matches!(outcome, Err(Error::TooLarge(_))), "{outcome:?}");
    assert_eq!(pool.counters().pool().unwrap().open_steps, 0, "the step was cancelled");
}

#[test]
fn limits_of_the_creation_are_limits() {
    let _session = Session::new();
    let config = small().max_sequences(2).max_step_sequences(1).max_step_tokens(8);
    let pool: Pool = create(&config.max_tokens_per_sequence(10), 1);
    let (a, b) = (sequence(&pool), sequence(&pool));
    let outcome = pool.create_sequence(&kvrt::SequenceConfig::new());
    assert_error(outcome, Status::LIMIT, "max_sequences = 2");
    assert_error(pool.fork_sequence(a, &mut [Sequence::default()]), Status::LIMIT, "0");
    let step = pool.begin_step().unwrap();
    assert_error(step.append(a, 9, None), Status::LIMIT, "max_step_tokens = 8");
    step.append(a, 8, None).unwrap();
    assert_error(step.append(b, 1, None), Status::LIMIT, "max_step_sequences = 1");
    let outcome = step.append_batch(&[a, b], &[1, 1], None, None);
    assert_error(outcome, Status::LIMIT, "max_step_sequences = 1");
    step.cancel().unwrap();
    prefill(&pool, a, 8).unwrap();
    assert_error(prefill(&pool, a, 8), Status::LIMIT, "max_tokens_per_sequence");
}

#[test]
fn a_plan_says_what_a_pool_will_hold() {
    let _session = Session::new();
    let config = small();
    let plan = kvrt::plan(&config, &model(3), 10, 100).unwrap();
    assert_eq!((plan.sequences, plan.tokens_per_sequence), (10, 100));
    assert_eq!(plan.bytes_per_token, 3 * BLOCK_BYTES / 16);
    assert_eq!(plan.bytes_per_sequence, 3 * 7 * BLOCK_BYTES);
    assert_eq!(plan.arena_bytes_needed, 2 << 20);
    assert_eq!(plan.sequences_that_fit, SLAB_BLOCKS / 21);
    assert_eq!(plan.tokens_that_fit, SLAB_BLOCKS / 3 * 16);
    let pool: Pool = create(&config, 3);
    assert_eq!(pool.counters().pool().unwrap().metadata_bytes, plan.metadata_bytes);
    let defaults = kvrt::plan(&config, &model(3), 0, 0).unwrap();
    assert_eq!((defaults.sequences, defaults.tokens_per_sequence), (4, 8192));
    assert_eq!(plan.tokens_that_fit_each, SLAB_BLOCKS / 30 * 16);
    assert_eq!(plan.tokens_by_bytes, (2 << 20) / (3 * BLOCK_BYTES / 16));
    assert_eq!((plan.bytes_per_block, plan.blocks_per_sequence), (3 * BLOCK_BYTES, 21));
    assert_error(kvrt::plan(&PoolConfig::new(1), &model(1), 0, 0), Status::INVALID, "arena_bytes");
}

#[test]
fn a_plan_without_an_arena_says_how_large_it_must_be() {
    let _session = Session::new();
    let layer = || SHAPE.layer().key_format(Format::F32);
    let layers = [layer(), layer().window(32), layer().shares_cache_of(0)];
    let model = kvrt::Model::new(layers);
    // The window's 32 tokens touch up to 3 blocks.
    let plan = kvrt::plan(&PoolConfig::new(0), &model, 1000, 1000).unwrap();
    assert_eq!(plan.bytes_per_sequence, (63 + 3) * BLOCK_BYTES);
    assert_eq!(plan.arena_bytes_needed, (66 * 1000u64).div_ceil(SLAB_BLOCKS) << 21);
    assert_eq!((plan.sequences_that_fit, plan.tokens_that_fit), (0, 0));
    assert_eq!((plan.tokens_that_fit_each, plan.tokens_by_bytes), (0, 0));
    assert_eq!(plan.full_bytes_per_token, BLOCK_BYTES / 16);
    assert_eq!(plan.constant_bytes_per_sequence, 3 * BLOCK_BYTES);
    for (layer, blocks) in [(0, 63), (1, 3), (2, 0)] {
        let plan = kvrt::plan_of_layer(&PoolConfig::new(0), &model, 1, 1000, layer).unwrap();
        assert_eq!(plan.layer, layer);
        assert_eq!(plan.layer_bytes_per_sequence, blocks * BLOCK_BYTES);
        assert_eq!(plan.layer_bytes_per_block, if layer == 2 { 0 } else { BLOCK_BYTES });
    }
    let outcome = kvrt::plan_of_layer(&PoolConfig::new(0), &model, 1, 1000, 3);
    assert_error(outcome, Status::INVALID, "layer 3");
}

#[test]
fn counters_add_up_over_classes() {
    let _session = Session::new();
    let shape = Shape { key_dim: 64, ..SHAPE };
    let model = kvrt::Model::new([SHAPE.layer(), shape.layer()]);
    let pool = Pool::create(&config(), &model).unwrap();
    let sequence = sequence(&pool);
    let step = pool.begin_step().unwrap();
    step.append(sequence, 40, None).unwrap();
    step.reserve().unwrap();
    let stats = pool.counters().pool().unwrap();
    assert_eq!((stats.classes, stats.live_blocks, stats.sequences), (2, 6, 1));
    let classes = [0, 1].map(|index| pool.counters().class(index).unwrap());
    assert_eq!(classes.map(|class| class.pinned), [3, 3]);
    assert_eq!(classes.iter().map(|class| class.total).sum::<u64>(), stats.total);
    assert_eq!(
        stats.live_bytes,
        classes.iter().map(|class| class.pinned * class.block_bytes).sum::<u64>()
    );
    assert_eq!(
        stats.total,
        stats.free + stats.cached + stats.pinned + stats.parked + stats.loading
    );
    assert_error(pool.counters().class(2), Status::INVALID, "2 classes");
}

/// Counts what it hands out, and refuses everything behind a number of calls.
struct Counting {
    calls: Arc<AtomicU64>,
    live_bytes: Arc<AtomicU64>,
    refuse_at: u64,
}

// SAFETY: the system's allocator, or null.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if self.calls.fetch_add(1, Ordering::Relaxed) >= self.refuse_at {
            return std::ptr::null_mut();
        }
        self.live_bytes.fetch_add(layout.size() as u64, Ordering::Relaxed);
        System.alloc(layout)
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        self.live_bytes.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        System.dealloc(memory, layout);
    }
}

#[test]
fn an_allocator_of_the_host_serves_the_pool_and_may_refuse() {
    let _session = Session::new();
    let (calls, live_bytes) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let create = |refuse_at| {
        calls.store(0, Ordering::Relaxed);
        let allocator =
            Counting { calls: calls.clone(), live_bytes: live_bytes.clone(), refuse_at };
        Pool::create_with_hooks(&small(), &model(1), Hooks::new().allocator(allocator))
    };
    let pool = create(u64::MAX).unwrap();
    let needed = calls.load(Ordering::Relaxed);
    let stats = pool.counters().pool().unwrap();
    assert_eq!(stats.host_allocations, needed);
    assert_eq!(stats.metadata_bytes, live_bytes.load(Ordering::Relaxed));
    let sequence = sequence(&pool);
    prefill(&pool, sequence, 100).unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), needed, "nothing is allocated after creation");
    drop(pool);
    assert_eq!(live_bytes.load(Ordering::Relaxed), 0);

    for refuse_at in 0..needed {
        let error = create(refuse_at).unwrap_err();
        assert!(matches!(error, Error::NoMemory(_)), "{refuse_at}: {error}");
        assert_eq!(live_bytes.load(Ordering::Relaxed), 0, "what was taken came back");
    }
}
