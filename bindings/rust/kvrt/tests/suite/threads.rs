//! Threads: what may go where, and a shared pool under several at once.

use std::sync::atomic::{AtomicBool, Ordering};

use kvrt::{
    Counters, Error, Hooks, Pool, PoolConfig, Sequence, Serial, Shared, SharedPool, Step, Tables,
    Tensor, TensorMut, Work,
};

use crate::common::*;

fn is_send<T: Send>() {}
fn is_sync<T: Sync>() {}

/// Answers whether a type has a trait, which a bound alone cannot deny: the inherent constant is
/// there for types that have it, the other trait's for all.
macro_rules! implements {
    ($trait:ident: $type:ty) => {{
        trait Otherwise {
            const ANSWER: bool = false;
        }
        impl<T: ?Sized> Otherwise for T {}
        struct Asked<T: ?Sized>(std::marker::PhantomData<T>);
        #[allow(dead_code)]
        impl<T: ?Sized + $trait> Asked<T> {
            const ANSWER: bool = true;
        }
        <Asked<$type>>::ANSWER
    }};
}

#[test]
fn kinds_go_to_the_threads_that_the_header_allows() {
    is_send::<Pool>();
    assert!(!implements!(Sync: Pool));
    assert!(!implements!(Send: Step<'static, Serial>));
    assert!(!implements!(Sync: Step<'static, Serial>));
    is_send::<SharedPool>();
    is_sync::<SharedPool>();
    is_send::<Step<'static, Shared>>();
    is_sync::<Step<'static, Shared>>();
    is_send::<Counters<'static>>();
    is_sync::<Counters<'static>>();
    is_send::<Tables<'static>>();
    is_sync::<Tables<'static>>();
    is_send::<Tensor<'static>>();
    is_send::<TensorMut<'static>>();
    is_send::<Hooks>();
    is_sync::<Work>();
    is_send::<Sequence>();
    is_sync::<Sequence>();
    is_send::<Error>();
    is_sync::<PoolConfig>();
    is_send::<kvrt::AppendInfo>();
}

#[test]
fn a_plain_pool_moves_between_threads() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 1, 40, 91);
    let first = text.run(&pool, sequence, 0..20);
    let (pool, second) = std::thread::scope(|scope| {
        let text = &text;
        let moved = scope.spawn(move || {
            let out = text.run(&pool, sequence, 20..40);
            (pool, out)
        });
        moved.join().unwrap()
    });
    text.assert_outputs(0, 0..20, &first[0], 2e-6, &Rule::default(), causal);
    text.assert_outputs(0, 20..40, &second[0], 2e-6, &Rule::default(), causal);
    pool.check().unwrap();
}

#[test]
fn counters_of_a_plain_pool_are_read_from_another_thread() {
    let _session = Session::new();
    let pool = pool(1);
    let done = AtomicBool::new(false);
    let counters = pool.counters();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut last = 0;
            while !done.load(Ordering::Relaxed) {
                let stats = counters.pool().unwrap();
                assert_eq!(stats.total, stats.free + stats.pinned + stats.parked);
                assert!(stats.tokens_accepted >= last);
                last = stats.tokens_accepted;
                counters.class(0).unwrap();
            }
        });
        let sequence = sequence(&pool);
        let text = Text::new(SHAPE, 1, 200, 92);
        for token in 0..200 {
            text.run(&pool, sequence, token..token + 1);
        }
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
    assert_eq!(counters.pool().unwrap().tokens_accepted, 200);
}

#[test]
fn a_shared_pool_serves_several_threads_at_once() {
    let _session = Session::new();
    let pool: SharedPool = create(&config().threads(2), 1);
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let pool = &pool;
            scope.spawn(move || {
                let text = Text::new(SHAPE, 1, 120, 93 + seed);
                for _ in 0..5 {
                    let sequence = sequence(pool);
                    let mut from = 0;
                    while from < 120 {
                        // Two steps are open at most: the others wait for their turn.
                        let step = match pool.begin_step() {
                            Ok(step) => step,
                            Err(Error::Limit(_)) => {
                                std::thread::yield_now();
                                continue;
                            }
                            Err(error) => panic!("{error}"),
                        };
                        step.append(sequence, 40, None).unwrap();
                        step.reserve().unwrap();
                        let out = text.pass(&step, from..from + 40);
                        let rule = Rule::default();
                        text.assert_outputs(0, from..from + 40, &out[0], 2e-6, &rule, causal);
                        step.end().unwrap();
                        from += 40;
                    }
                    pool.release_sequence(sequence).unwrap();
                }
            });
        }
    });
    pool.check().unwrap();
    assert_eq!(pool.counters().pool().unwrap().tokens_accepted, 4 * 5 * 120);
}

#[test]
fn a_step_of_a_shared_pool_is_called_from_several_threads() {
    let _session = Session::new();
    let pool: SharedPool = create(&config(), 4);
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 4, 40, 98);
    let step = pool.begin_step().unwrap();
    step.append(sequence, 40, None).unwrap();
    step.reserve().unwrap();
    std::thread::scope(|scope| {
        for layer in 0..4 {
            let (text, step) = (&text, &step);
            scope.spawn(move || {
                let (keys, values) = (&text.keys[layer], &text.values[layer]);
                let mut out = vec![0.0; 40 * SHAPE.out_row()];
                let queries = dense(&text.queries[layer], 40, 4);
                let l = layer as u32;
                step.write(l, &dense(keys, 40, 2), &dense(values, 40, 2)).unwrap();
                step.attend(l, &queries, &mut dense_mut(&mut out, 40, 4)).unwrap();
                text.assert_outputs(layer, 0..40, &out, 2e-6, &Rule::default(), causal);
            });
        }
    });
    let ended = std::thread::scope(|scope| scope.spawn(move || step.end()).join().unwrap());
    assert_eq!(ended.unwrap().accepted_tokens, 40);
}
