from megloom.assets.partitions import split_step_key, step_key


def test_text_order_of_keys_is_step_order():
    keys = [step_key("demo", step) for step in (0, 9, 10, 99, 100, 12345)]
    assert keys == sorted(keys)


def test_a_key_splits_back_into_run_and_step():
    assert split_step_key(step_key("a.b-c_1", 42)) == ("a.b-c_1", 42)
