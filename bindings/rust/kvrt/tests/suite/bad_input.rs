//! Wrong shapes, lengths, strides, numbers: an error from here or from the library, never damage.

use kvrt::{
    AttendOptions, Device, Elements, ElementsMut, Format, Layer, Layout, Model, Pool, PoolConfig,
    Rope, RopeStyle, Status, Strides, Tensor, TensorMut,
};

use crate::common::*;

fn strides(offset: usize, row: i64, head: i64, dim: i64) -> Strides {
    Strides { offset, row, head, dim }
}

/// Writes tensors in a step of one row, and attends with them: what the calls say.
fn write(keys: Tensor<'_>, values: Tensor<'_>) -> kvrt::Result<()> {
    in_step_of_one_row(|step| step.write(0, &keys, &values))
}

fn attend(queries: Tensor<'_>, mut out: TensorMut<'_>) -> kvrt::Result<()> {
    in_step_of_one_row(|step| {
        step.write(0, &dense(&[0.5; 64], 1, 2), &dense(&[0.5; 64], 1, 2))?;
        let with_options = step.attend_with(0, &queries, &mut out, AttendOptions::default());
        assert_eq!(step.attend(0, &queries, &mut out), with_options);
        with_options
    })
}

fn in_step_of_one_row<R>(body: impl FnOnce(&kvrt::Step<'_>) -> R) -> R {
    let pool = pool(1);
    let step = pool.begin_step().unwrap();
    step.append(sequence(&pool), 1, None).unwrap();
    step.reserve().unwrap();
    body(&step)
}

#[test]
fn a_dense_tensor_has_exactly_its_elements() {
    let _session = Session::new();
    let data = [0.0; 64];
    let half = [0u16; 64];
    let check = |shape, words: &str| {
        for wrong in [Elements::F32(&data), Elements::F16(&half), Elements::Bf16(&half)] {
            let wrong = Tensor::dense(wrong, shape);
            let good = dense(&data, 1, 2);
            assert_error(write(wrong, good), Status::INVALID, &format!("keys: {words}"));
            assert_error(write(good, wrong), Status::INVALID, &format!("values: {words}"));
            let mut place = [7.0; 128];
            let outcome = attend(wrong, dense_mut(&mut place, 1, 4));
            assert_error(outcome, Status::INVALID, &format!("queries: {words}"));
            assert_eq!(place, [7.0; 128], "nothing was written");
        }
        let (mut out, mut half_out) = ([7.0; 64], [7u16; 64]);
        for out in [
            TensorMut::dense(ElementsMut::F32(&mut out), shape),
            TensorMut::dense(ElementsMut::F16(&mut half_out.clone()), shape),
            TensorMut::dense(ElementsMut::Bf16(&mut half_out), shape),
        ] {
            let outcome = attend(dense(&[0.5; 128], 1, 4), out);
            assert_error(outcome, Status::INVALID, &format!("out: {words}"));
        }
    };
    for shape in [[1, 2, 31], [1, 2, 33], [2, 2, 32], [1, 1, 32]] {
        let takes = shape.iter().product::<usize>() - 1;
        check(shape, &format!("{shape:?} at Strides {{ offset: 0, row: {}", shape[1] * shape[2]));
        let outcome = write(Tensor::dense(Elements::F32(&data), shape), dense(&data, 1, 2));
        let words = format!("takes elements 0 to {takes}, the slice holds 64");
        assert_error(outcome, Status::INVALID, &words);
    }
    for shape in [[0, 2, 32], [1, 0, 32], [1, 2, 0]] {
        check(shape, &format!("{shape:?} has no elements"));
        let nothing = Tensor::dense(Elements::F32(&[]), shape);
        assert_error(write(nothing, nothing), Status::INVALID, "keys: ");
    }
    for shape in [[usize::MAX, 2, 32], [1 << 40, 1 << 20, 32], [2, usize::MAX, usize::MAX]] {
        check(shape, &format!("{shape:?} is out of reach"));
    }
}

#[test]
fn a_strided_tensor_stays_within_its_slice() {
    let _session = Session::new();
    let data = [0.0; 64];
    let strided = |shape, strides| {
        write(Tensor::strided(Elements::F32(&data), shape, strides), dense(&data, 1, 2))
    };
    // These lie in the slice: it is the library that compares them with the layer.
    for (shape, strides) in [
        ([2, 1, 32], strides(0, 32, 32, 1)),
        ([2, 1, 32], strides(63, -32, 0, -1)),
        // A row can be read again and again.
        ([1 << 40, 1, 32], strides(0, 0, 0, 1)),
    ] {
        assert_error(strided(shape, strides), Status::INVALID, "keys (kv_tensor) is [");
    }
    strided([1, 2, 32], strides(63, 0, -32, -1)).unwrap();
    // Three zeroes mean dense in C.
    assert_error(strided([64, 64, 64], strides(7, 0, 0, 0)), Status::INVALID, "keys: the strides");
    for (shape, strides) in [
        ([2, 1, 32], strides(1, 32, 32, 1)),
        ([2, 1, 32], strides(0, 33, 32, 1)),
        ([2, 1, 32], strides(62, -32, 0, -1)),
        ([2, 1, 32], strides(0, -1, 0, 1)),
        ([1, 1, 1], strides(64, 1, 1, 1)),
        ([1, 1, 1], strides(usize::MAX, 1, 1, 1)),
        ([2, 1, 1], strides(0, i64::MAX, 0, 1)),
        ([3, 1, 1], strides(0, i64::MAX, 0, 1)),
        ([2, 2, 1], strides(0, i64::MIN, i64::MIN, 1)),
        ([usize::MAX, 1, 1], strides(0, 1, 0, 1)),
        ([2, 2, 32], strides(0, i64::MAX, -i64::MAX, 1)),
    ] {
        assert_error(strided(shape, strides), Status::INVALID, "keys: [");
    }
}

#[test]
fn elements_of_an_output_lie_apart() {
    let _session = Session::new();
    let mut data = [0.0; 4096];
    let mut strided = |shape, strides| {
        let out = TensorMut::strided(ElementsMut::F32(&mut data), shape, strides);
        attend(dense(&[0.5; 128], 1, 4), out)
    };
    for good in [
        strides(0, 64, 32, 1),
        strides(0, 32, 512, 1),
        strides(4095, -64, -32, -1),
        strides(0, 2, 1, 64),
        strides(0, 1, 256, 8),
    ] {
        assert_error(strided([8, 2, 32], good), Status::INVALID, "out (kv_tensor) is [8, 2, 32]");
    }
    for bad in [
        strides(0, 0, 32, 1),
        strides(0, 64, 0, 1),
        strides(0, 64, 32, 0),
        strides(0, 63, 32, 1),
        strides(0, 32, 32, 1),
        strides(0, 64, 31, 1),
        strides(2000, -32, 32, 1),
        strides(0, 1, 1, 64),
        strides(0, 2, 1, 4),
    ] {
        let words = "elements of [8, 2, 32] lie on each other";
        assert_error(strided([8, 2, 32], bad), Status::INVALID, words);
    }
    // Axes of one element have no stride.
    for (shape, strides) in [([1, 1, 32], strides(0, 0, 0, 1)), ([8, 1, 32], strides(0, 32, 0, 1))]
    {
        assert_error(strided(shape, strides), Status::INVALID, "out (kv_tensor) is [");
    }
    strided([1, 4, 32], strides(3, 0, 999, 2)).unwrap();
}

#[test]
fn tensors_must_fit_the_step_and_the_layer() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 1, 10, 101);
    let step = pool.begin_step().unwrap();
    step.append(sequence, 10, None).unwrap();
    step.reserve().unwrap();
    let (keys, values) = (dense(&text.keys[0], 10, 2), dense(&text.values[0], 10, 2));
    let queries = dense(&text.queries[0], 10, 4);
    let fewer = dense(text.keys(0, 0..9), 9, 2);
    let other_heads = dense(&text.keys[0], 10, 1);
    assert_error(step.write(0, &fewer, &values), Status::INVALID, "keys (kv_tensor) is [9, 2, 32]");
    assert_error(step.write(0, &keys, &other_heads), Status::INVALID, "values (kv_tensor)");
    assert_error(step.write(1, &keys, &values), Status::INVALID, "layer 1");
    let far = Tensor::strided(Elements::F32(&text.keys[0]), [1, 2, 32], strides(0, 1 << 41, 32, 1));
    assert_error(step.write(0, &far, &values), Status::INVALID, "");
    step.write(0, &keys, &values).unwrap();

    let mut memory = vec![7.0f32; 10 * SHAPE.out_row()];
    let mut short = vec![7.0f32; 9 * SHAPE.out_row()];
    let outcome = step.attend(0, &queries, &mut dense_mut(&mut short, 9, 4));
    assert_error(outcome, Status::INVALID, "out (kv_tensor) is [9, 4, 32]");
    let mut out = dense_mut(&mut memory, 10, 4);
    assert_error(step.attend(0, &keys, &mut out), Status::INVALID, "queries (kv_tensor)");
    assert_error(step.attend(7, &queries, &mut out), Status::INVALID, "layer 7");
    for length in [0, 39, 41] {
        let mut values = vec![7.0; length];
        let options = AttendOptions { log_sum_exp: Some(&mut values), ..Default::default() };
        let outcome = step.attend_with(0, &queries, &mut out, options);
        assert_error(outcome, Status::INVALID, "log_sum_exp");
        assert!(values.iter().all(|&x| x == 7.0));
    }
    // A broadcast query of more rows than there are must not make the library write behind
    // log_sum_exp.
    let many =
        Tensor::strided(Elements::F32(&text.queries[0]), [1 << 40, 4, 32], strides(0, 0, 32, 1));
    let mut values = [7.0; 40];
    let options = AttendOptions { log_sum_exp: Some(&mut values), ..Default::default() };
    let outcome = step.attend_with(0, &many, &mut out, options);
    assert_error(outcome, Status::INVALID, "log_sum_exp");
    assert!(memory.iter().all(|&x| x == 7.0), "nothing was written");
}

#[test]
fn arrays_of_a_layer_have_its_lengths() {
    let _session = Session::new();
    let layer = || Layer::new(4, 2, 32);
    let rope = |count| Rope::new(RopeStyle::Half).inverse_frequencies(vec![0.5; count]);
    for (layer, words) in [
        (layer().sink_logits(vec![0.0; 3]), "sink_logits: 3 elements, 4 are needed"),
        (layer().sink_logits(vec![]), "sink_logits: 0 elements"),
        (layer().alibi_slopes(vec![0.0; 5]), "alibi_slopes: 5 elements"),
        (layer().rope(rope(15)), "inverse_frequencies: 15 elements, 16 are needed"),
        (layer().rope(rope(16).dimensions(16)), "inverse_frequencies: 16 elements, 8 are needed"),
        (layer().rope(rope(0).dimensions(0)), "inverse_frequencies: 0 elements"),
        (layer().sink_logits(vec![f32::NAN; 4]), "sink_logits[0] is not finite"),
        (layer().rope(rope(8).dimensions(17)), "dimensions 17"),
        (layer().rope(Rope::new(RopeStyle::Other(9))), "style 9"),
        (layer().rope(Rope::new(RopeStyle::Half).theta(0.5)), "theta"),
        (Layer::new(3, 2, 32), "multiple of kv_heads"),
        (Layer::new(0, 0, 32), "kv_heads 0"),
        (layer().softmax_scale(f32::INFINITY), "softmax_scale"),
        (layer().window_sinks(1), "window_sinks"),
        (layer().shares_cache_of(0), "shared_layer 0"),
    ] {
        let model = Model::new([layer]);
        assert_error(Pool::create(&config(), &model), Status::INVALID, words);
        assert_error(kvrt::plan(&config(), &model, 0, 0), Status::INVALID, words);
    }
    for layer in [
        Layer::new(4, 2, 30),
        Layer::new(4, 2, 512),
        layer().value_dim(20),
        layer().key_format(Format::Other(42)),
        layer().value_format(Format::Other(42)),
    ] {
        let outcome = Pool::create(&config(), &Model::new([layer]));
        assert_error(outcome, Status::UNSUPPORTED, "layer 0");
    }
}

#[test]
fn models_and_configs_keep_to_their_bounds() {
    let _session = Session::new();
    let good = model(1);
    assert_error(Pool::create(&config(), &Model::new([])), Status::INVALID, "layer_count is 0");
    let many = Model::new(vec![Layer::new(1, 1, 32); 1025]);
    assert_error(Pool::create(&config(), &many), Status::INVALID, "layer_count is 1025");
    for (config, status, words) in [
        (PoolConfig::new(0), Status::INVALID, "arena_bytes is 0"),
        (PoolConfig::new(u64::MAX), Status::TOO_LARGE, "arena_bytes"),
        (config().block_tokens(8), Status::INVALID, "block_tokens is 8"),
        (config().max_sequences(65537), Status::INVALID, "max_sequences"),
        (config().max_step_sequences(9), Status::INVALID, "max_step_sequences"),
        (config().max_tokens_per_sequence(u32::MAX), Status::INVALID, "max_tokens_per_sequence"),
        (config().max_step_tokens(u32::MAX), Status::INVALID, "max_step_tokens"),
        (config().threads(1000), Status::INVALID, "threads"),
        (config().layout(Layout::Other(3)), Status::UNSUPPORTED, "layout 3"),
        (config().device(Device::Other(8)), Status::UNSUPPORTED, "device 8"),
    ] {
        assert_error(Pool::create(&config, &good), status, words);
    }
}

#[test]
fn forks_need_room_for_children() {
    let _session = Session::new();
    let pool = pool(1);
    let parent = sequence(&pool);
    assert_error(pool.fork_sequence(parent, &mut []), Status::INVALID, "count is 0");
    let mut too_many = [kvrt::Sequence::default(); 8];
    assert_error(pool.fork_sequence(parent, &mut too_many), Status::LIMIT, "8 children");
    assert!(too_many.iter().all(|&child| child == kvrt::Sequence::default()), "none was made");
}
