//! Prints plane 2's lower bounds for cases from a file, to compare them with pgvector's own results:
//! `bound_check FILE`.
//!
//! The file is a sequence of cases, little-endian: metric u32 (1 L2, 2 inner product, 3 cosine), dim u32,
//! rows u32, then the query and the rows as f32. The model's mean is the rows'. For each row one line:
//! case, row, the bound and the estimate as operator values with 17 digits; or `zero` for a row or query
//! without a cosine distance.

use std::{env, fs, process::ExitCode};

use polign_engine::{
    Metric,
    kernel::RacyBytes,
    quantize::{Model, RowError, plane2, score_to_distance},
};

/// Takes `count` values from the front of `bytes`.
fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Result<&'a [u8], String> {
    let (front, rest) = bytes.split_at_checked(count * 4).ok_or("the file ends within a case")?;
    *bytes = rest;
    Ok(front)
}

fn floats(bytes: &mut &[u8], count: usize) -> Result<Vec<f32>, String> {
    let (values, _) = take(bytes, count)?.as_chunks::<4>();
    Ok(values.iter().map(|v| f32::from_le_bytes(*v)).collect())
}

fn mean(rows: &[Vec<f32>], metric: Metric, dim: usize) -> Vec<f32> {
    let mut sum = vec![0f64; dim];
    for row in rows {
        let norm = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        let length = if metric == Metric::Cosine && norm > 0.0 { norm } else { 1.0 };
        sum.iter_mut().zip(row).for_each(|(sum, v)| *sum += f64::from(*v) / length);
    }
    sum.into_iter().map(|sum| (sum / rows.len().max(1) as f64) as f32).collect()
}

fn run(path: &str) -> Result<(), String> {
    let file = fs::read(path).map_err(|error| format!("{path}: {error}"))?;
    let mut bytes = &file[..];
    let mut case = 0;
    while !bytes.is_empty() {
        let header = take(&mut bytes, 3)?.as_chunks::<4>().0;
        let [metric, dim, rows] = [0, 1, 2].map(|i| u32::from_le_bytes(header[i]) as usize);
        let metric = u8::try_from(metric).ok().and_then(Metric::from_code);
        let metric = metric.ok_or_else(|| format!("case {case}: no such metric"))?;
        let query = floats(&mut bytes, dim)?;
        let rows: Vec<Vec<f32>> =
            (0..rows).map(|_| floats(&mut bytes, dim)).collect::<Result<_, _>>()?;
        let model = Model::new(1, metric, dim, case, mean(&rows, metric, dim))
            .map_err(|error| format!("case {case}: {error}"))?;
        let query = match model.query(&query) {
            Err(RowError::ZeroNorm) => None,
            query => Some(query.map_err(|error| format!("case {case}: {error}"))?),
        };
        let mut x = vec![0.0; model.padded_dim()];
        for (i, row) in rows.iter().enumerate() {
            let projected = model.project_row(row, &mut x);
            let (Some(query), Ok(())) = (&query, projected) else {
                println!("{case} {i} zero");
                continue;
            };
            let mut record = Vec::new();
            plane2::encode(&model, &x, i as u64, &mut record);
            let refined = query.refine(RacyBytes::new(&record));
            let [lower, estimate] =
                [refined.lower, refined.estimate].map(|score| score_to_distance(metric, score));
            println!("{case} {i} {lower:.16e} {estimate:.16e}");
        }
        case += 1;
    }
    Ok(())
}

fn main() -> ExitCode {
    let Some(path) = env::args().nth(1) else {
        eprintln!("usage: bound_check FILE");
        return ExitCode::FAILURE;
    };
    match run(&path) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
