//! Steps: batches, drafts, order of calls, two at once, and what becomes of one that is not ended.

use kvrt::{AppendInfo, Pool, Sequence, Status};

use crate::common::*;

#[test]
fn a_batch_mixes_prompts_and_decode_tokens() {
    let _session = Session::new();
    let pool = pool(2);
    let texts: Vec<Text> = (21..24).map(|seed| Text::new(SHAPE, 2, 64, seed)).collect();
    let sequences: Vec<Sequence> = texts.iter().map(|_| sequence(&pool)).collect();
    texts[0].run(&pool, sequences[0], 0..33);
    texts[2].run(&pool, sequences[2], 0..16);

    let step = pool.begin_step().unwrap();
    let mut infos = [AppendInfo::default(); 3];
    let ids: Vec<u32> = (0..23).collect();
    step.append_batch(&sequences, &[1, 20, 2], Some(&ids), Some(&mut infos)).unwrap();
    let where_to = |info: &AppendInfo| (info.first_position(), info.item(), info.first_row());
    assert_eq!(infos.map(|info| where_to(&info)), [(33, 0, 0), (0, 1, 1), (16, 2, 21)]);
    assert!(format!("{:?}", infos[2]).contains("first_row: 21"));
    step.reserve().unwrap();

    let parts = [(&texts[0], 33..34), (&texts[1], 0..20), (&texts[2], 16..18)];
    let mut outputs = Vec::new();
    for layer in 0..2 {
        let join = |part: fn(&Text, usize, std::ops::Range<usize>) -> &[f32]| {
            parts.iter().flat_map(|(t, range)| part(t, layer, range.clone())).copied().collect()
        };
        let (keys, values, queries): (Vec<f32>, Vec<f32>, Vec<f32>) =
            (join(Text::keys), join(Text::values), join(Text::queries));
        let mut out = vec![f32::NAN; 23 * SHAPE.out_row()];
        let l = layer as u32;
        step.write(l, &dense(&keys, 23, 2), &dense(&values, 23, 2)).unwrap();
        step.attend(l, &dense(&queries, 23, 4), &mut dense_mut(&mut out, 23, 4)).unwrap();
        outputs.push(out);
    }
    step.accept_batch(&sequences, &[1, 20, 2]).unwrap();
    assert_eq!(step.end().unwrap().accepted_tokens, 23);
    for (layer, out) in outputs.iter().enumerate() {
        let mut row = 0;
        for (text, range) in parts.clone() {
            let found = &out[row * SHAPE.out_row()..][..range.len() * SHAPE.out_row()];
            text.assert_outputs(layer, range.clone(), found, 2e-6, &Rule::default(), causal);
            row += range.len();
        }
    }
    pool.check().unwrap();
}

#[test]
fn rejected_drafts_are_rolled_back() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 1, 40, 25);
    text.run(&pool, sequence, 0..30);
    let free_before = pool.counters().pool().unwrap().free;

    // A token and five drafts that cross into a new block; the first two rows are accepted.
    let mut drafts = Text::new(SHAPE, 1, 40, 26);
    for (draft, own) in [
        (&mut drafts.keys[0], text.keys(0, 0..32)),
        (&mut drafts.values[0], text.values(0, 0..32)),
        (&mut drafts.queries[0], text.queries(0, 0..32)),
    ] {
        draft[..own.len()].copy_from_slice(own);
    }
    let step = pool.begin_step().unwrap();
    step.append(sequence, 6, Some(&[1, 2, 3, 4, 5, 6])).unwrap();
    step.reserve().unwrap();
    let verified = drafts.pass(&step, 30..36);
    drafts.assert_outputs(0, 30..36, &verified[0], 2e-6, &Rule::default(), causal);
    step.accept(sequence, 2).unwrap();
    let report = step.end().unwrap();
    assert_eq!((report.accepted_tokens, report.blocks_returned), (2, 1));

    assert_eq!(pool.sequence_info(sequence).unwrap().accepted, 32);
    assert_eq!(pool.counters().pool().unwrap().free, free_before);
    let found = text.run(&pool, sequence, 32..40);
    text.assert_outputs(0, 32..40, &found[0], 2e-6, &Rule::default(), causal);

    let step = pool.begin_step().unwrap();
    step.append(sequence, 3, None).unwrap();
    step.reserve().unwrap();
    drafts.pass(&step, 36..39);
    step.accept(sequence, 0).unwrap();
    assert_error(step.accept(sequence, 4), Status::INVALID, "count is 4");
    step.end().unwrap();
    assert_eq!(pool.sequence_info(sequence).unwrap().accepted, 40);
}

#[test]
fn two_steps_are_open_at_once_and_sequences_are_called_meanwhile() {
    let _session = Session::new();
    let pool = pool(1);
    let (a, b, c) = (sequence(&pool), sequence(&pool), sequence(&pool));
    let (text_a, text_b) = (Text::new(SHAPE, 1, 40, 27), Text::new(SHAPE, 1, 40, 28));
    let first = pool.begin_step().unwrap();
    let second = pool.begin_step().unwrap();
    assert_error(pool.begin_step(), Status::LIMIT, "2 steps are open");
    assert_eq!(pool.counters().pool().unwrap().open_steps, 2);

    first.append(a, 40, None).unwrap();
    second.append(b, 40, None).unwrap();
    assert_error(second.append(a, 1, None), Status::INVALID, "open step already");
    first.reserve().unwrap();
    second.reserve().unwrap();
    let out_a = text_a.pass(&first, 0..40);
    let out_b = text_b.pass(&second, 0..40);
    assert_error(pool.truncate_sequence(a, 0), Status::INVALID, "open step");
    pool.release_sequence(c).unwrap();
    assert!(pool.sequence_info(a).unwrap().in_step);
    second.end().unwrap();
    first.end().unwrap();
    text_a.assert_outputs(0, 0..40, &out_a[0], 2e-6, &Rule::default(), causal);
    text_b.assert_outputs(0, 0..40, &out_b[0], 2e-6, &Rule::default(), causal);
}

#[test]
fn a_sequence_released_in_a_step_runs_to_the_end() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 1, 20, 29);
    let step = pool.begin_step().unwrap();
    step.append(sequence, 20, None).unwrap();
    step.reserve().unwrap();
    pool.release_sequence(sequence).unwrap();
    assert_error(pool.sequence_info(sequence), Status::STALE, "");
    let out = text.pass(&step, 0..20);
    text.assert_outputs(0, 0..20, &out[0], 2e-6, &Rule::default(), causal);
    step.end().unwrap();
    let stats = pool.counters().pool().unwrap();
    assert_eq!((stats.sequences, stats.pinned), (0, 0));
}

fn begun(pool: &Pool, sequence: Sequence) -> kvrt::Step<'_> {
    let step = pool.begin_step().unwrap();
    step.append(sequence, 20, None).unwrap();
    step.reserve().unwrap();
    step
}

#[test]
fn a_cancelled_or_dropped_step_leaves_no_trace() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 1, 20, 30);
    let ways: [fn(kvrt::Step<'_>); 2] = [|step| step.cancel().unwrap(), |step| drop(step)];
    for (done, way) in ways.into_iter().enumerate() {
        let step = begun(&pool, sequence);
        text.pass(&step, 0..20);
        way(step);
        let stats = pool.counters().pool().unwrap();
        assert_eq!((stats.open_steps, stats.steps_cancelled), (0, done as u64 + 1));
        assert_eq!((stats.pinned, stats.tokens_accepted), (0, 0));
        assert_eq!(pool.sequence_info(sequence).unwrap().accepted, 0);
    }
    pool.check().unwrap();
}

/// The library's last message on this thread, which only errors change.
fn last_message() -> String {
    let mut bytes = [0u8; 512];
    // SAFETY: the library writes at most as many bytes as it is told.
    let length = unsafe { kvrt_sys::kv_last_error(bytes.as_mut_ptr().cast(), bytes.len()) };
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}

#[test]
fn a_step_that_has_gone_is_not_cancelled_again() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 1, 20, 34);
    assert_error(pool.pin(sequence, 0..0), Status::INVALID, "count is 0");
    let before = last_message();
    let step = begun(&pool, sequence);
    text.pass(&step, 0..20);
    step.end().unwrap();
    begun(&pool, sequence).cancel().unwrap();
    drop(begun(&pool, sequence));
    assert_eq!(last_message(), before, "a call failed on the way");
}

#[test]
fn a_forgotten_step_stays_open_until_its_pool_goes() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    std::mem::forget(begun(&pool, sequence));
    assert_eq!(pool.counters().pool().unwrap().open_steps, 1);
    assert!(pool.sequence_info(sequence).unwrap().in_step);
    assert_error(pool.truncate_sequence(sequence, 0), Status::INVALID, "open step");
    std::mem::forget(pool.begin_step().unwrap());
    assert_error(pool.begin_step(), Status::LIMIT, "");
    drop(pool);
}

#[test]
fn calls_come_in_their_order() {
    let _session = Session::new();
    let pool = pool(2);
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 2, 20, 31);
    let (keys, values) = (dense(text.keys(0, 0..20), 20, 2), dense(text.values(0, 0..20), 20, 2));
    let queries = dense(text.queries(0, 0..20), 20, 4);
    let mut memory = vec![0.0; 20 * SHAPE.out_row()];
    let mut out = dense_mut(&mut memory, 20, 4);

    let step = pool.begin_step().unwrap();
    assert_error(step.reserve(), Status::INVALID, "nothing was appended");
    assert_error(step.append(sequence, 0, None), Status::INVALID, "count is 0");
    step.append(sequence, 20, None).unwrap();
    assert_error(step.append(sequence, 1, None), Status::INVALID, "open step already");
    assert_error(step.write(0, &keys, &values), Status::INVALID, "kv_step_reserve first");
    assert_error(step.accept(sequence, 1), Status::INVALID, "kv_step_reserve first");
    step.reserve().unwrap();
    assert_error(step.reserve(), Status::INVALID, "reserved already");
    assert_error(step.append(sequence, 1, None), Status::INVALID, "reserved already");
    assert_error(step.remove(sequence), Status::INVALID, "reserved already");
    assert_error(step.attend(0, &queries, &mut out), Status::INVALID, "kv_write of layer 0");
    step.write(0, &keys, &values).unwrap();
    assert_error(step.attend(2, &queries, &mut out), Status::INVALID, "layer 2");
    step.attend(0, &queries, &mut out).unwrap();
    // Layer 1 was not written: the step is gone all the same.
    assert_error(step.end(), Status::INVALID, "");
    let stats = pool.counters().pool().unwrap();
    assert_eq!((stats.open_steps, stats.steps_ended, stats.steps_cancelled), (0, 0, 1));
    assert_error(pool.begin_step().unwrap().end(), Status::INVALID, "was not reserved");
}

#[test]
fn an_item_can_be_taken_out_before_reserve() {
    let _session = Session::new();
    let pool = pool(1);
    let (a, b) = (sequence(&pool), sequence(&pool));
    let text = Text::new(SHAPE, 1, 10, 32);
    let step = pool.begin_step().unwrap();
    step.append(a, 5, None).unwrap();
    step.append(b, 10, None).unwrap();
    step.remove(a).unwrap();
    step.reserve().unwrap();
    let out = text.pass(&step, 0..10);
    text.assert_outputs(0, 0..10, &out[0], 2e-6, &Rule::default(), causal);
    assert_eq!(step.end().unwrap().accepted_tokens, 10);
    assert_eq!(pool.sequence_info(a).unwrap().accepted, 0);
}

#[test]
fn a_batch_is_appended_and_accepted_whole_or_not_at_all() {
    let _session = Session::new();
    let pool = pool(1);
    let (a, b) = (sequence(&pool), sequence(&pool));
    let step = pool.begin_step().unwrap();
    assert_error(step.append_batch(&[], &[], None, None), Status::INVALID, "items is 0");
    assert_error(step.append_batch(&[a, b], &[1], None, None), Status::INVALID, "counts");
    assert_error(step.append_batch(&[a, a], &[1, 1], None, None), Status::INVALID, "item 1");
    let ids = [0; 4];
    let outcome = step.append_batch(&[a, b], &[1, 2], Some(&ids), None);
    assert_error(outcome, Status::INVALID, "token_ids: 4 elements, 3 are needed");
    let mut infos = [AppendInfo::default(); 1];
    let outcome = step.append_batch(&[a, b], &[1, 2], None, Some(&mut infos));
    assert_error(outcome, Status::INVALID, "infos: 1 elements, 2 are needed");
    let counts = [u32::MAX, u32::MAX];
    assert_error(step.append_batch(&[a, b], &counts, None, None), Status::LIMIT, "item 0");
    assert_error(step.append(a, 3, Some(&[1, 2])), Status::INVALID, "token_ids: 2 elements");
    assert_error(step.reserve(), Status::INVALID, "nothing was appended");

    step.append_batch(&[a, b], &[4, 2], None, None).unwrap();
    step.reserve().unwrap();
    assert_error(step.accept_batch(&[a, b], &[1, 3]), Status::INVALID, "item 1");
    assert_error(step.accept_batch(&[a], &[1, 1]), Status::INVALID, "counts");
    let text = Text::new(SHAPE, 1, 6, 33);
    text.pass(&step, 0..6);
    step.end().unwrap();
    assert_eq!(pool.sequence_info(a).unwrap().accepted, 4, "the refused batch noted nothing");
}
