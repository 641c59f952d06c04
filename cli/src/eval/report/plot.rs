//! Plots as SVG text that takes the page's own text color, so that they read well on light and dark.

use std::fmt::Display;
use std::ops::Range;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Strategies beyond these begin anew.
const COLORS: [RGBColor; 10] = [
    RGBColor(66, 133, 208),
    RGBColor(230, 126, 34),
    RGBColor(46, 160, 103),
    RGBColor(214, 69, 80),
    RGBColor(142, 104, 200),
    RGBColor(150, 110, 80),
    RGBColor(222, 110, 180),
    RGBColor(125, 130, 138),
    RGBColor(160, 165, 40),
    RGBColor(30, 165, 185),
];
/// Drawn black, and replaced by the page's text color.
const INK: &str = "#000000";
const SIZE: (u32, u32) = (860, 420);
const FONT: (&str, u32) = ("sans-serif", 13);

/// A strategy's place in a plot of quality against time.
pub(super) struct Point {
    pub(super) name: String,
    pub(super) color: usize,
    pub(super) ttft_ms: f64,
    pub(super) value: f64,
    /// Bounds of the value.
    pub(super) low: f64,
    pub(super) high: f64,
}

/// One bar of a group.
pub(super) struct Bar {
    pub(super) color: usize,
    /// None where a strategy has no samples.
    pub(super) value: Option<f64>,
}

/// More strategies than this cannot be told apart by color, and their names would cover each other.
pub(super) const DISTINCT: usize = COLORS.len();

/// The color of a strategy, as CSS has it.
pub(super) fn css(color: usize) -> String {
    let RGBColor(red, green, blue) = pick(color);
    format!("#{red:02x}{green:02x}{blue:02x}")
}

fn pick(color: usize) -> RGBColor {
    COLORS.get(color % COLORS.len()).copied().unwrap_or(BLACK)
}

/// `what` (with its 95 % bounds) against time to first token, a point a strategy.
pub(super) fn against_time(what: &str, points: &[Point]) -> anyhow::Result<String> {
    draw(|root| {
        let right = points.iter().map(|point| point.ttft_ms).fold(1.0, f64::max) * 1.15;
        let top = points.iter().map(|point| point.high).fold(1e-9, f64::max) * 1.1;
        let mut chart = chart(&root)?.build_cartesian_2d(0.0..right, 0.0..top).map_err(failed)?;
        let mut mesh = chart.configure_mesh();
        mesh.axis_style(BLACK.mix(0.6)).max_light_lines(1).bold_line_style(BLACK.mix(0.15));
        mesh.label_style(FONT).x_desc("time to first token, ms (median)").y_desc(what).draw().map_err(failed)?;
        for point in points {
            let color = pick(point.color);
            let bounds = [(point.ttft_ms, point.low), (point.ttft_ms, point.high)];
            chart.draw_series([PathElement::new(bounds, color.stroke_width(2))]).map_err(failed)?;
            // At the right edge there is room to the left only.
            let (side, gap) = if point.ttft_ms > 0.8 * right { (HPos::Right, -9) } else { (HPos::Left, 9) };
            let label = FONT.into_font().into_text_style(&root).pos(Pos::new(side, VPos::Center));
            let mark = EmptyElement::at((point.ttft_ms, point.value))
                + Circle::new((0, 0), 5, color.filled())
                + Text::new(point.name.clone(), (gap, -8), label);
            chart.draw_series([mark]).map_err(failed)?;
        }
        Ok(())
    })
}

/// Bars in groups: for each task, one a strategy.
pub(super) fn bars(what: &str, tasks: &[(&str, Vec<Bar>)]) -> anyhow::Result<String> {
    draw(|root| {
        let values = tasks.iter().flat_map(|(_, bars)| bars.iter().filter_map(|bar| bar.value));
        let top = values.fold(1e-9, f64::max) * 1.1;
        let x: Range<f64> = 0.0..tasks.len() as f64;
        let mut chart = chart(&root)?.build_cartesian_2d(x, 0.0..top).map_err(failed)?;
        let mut mesh = chart.configure_mesh();
        mesh.axis_style(BLACK.mix(0.6)).max_light_lines(1).bold_line_style(BLACK.mix(0.15));
        mesh.disable_x_mesh().x_labels(0).label_style(FONT).y_desc(what).draw().map_err(failed)?;
        let label = FONT.into_font().into_text_style(&root).pos(Pos::new(HPos::Center, VPos::Top));
        for (place, (task, bars)) in tasks.iter().enumerate() {
            let place = place as f64;
            let width = 0.8 / bars.len().max(1) as f64;
            for (index, bar) in bars.iter().enumerate() {
                let left = place + 0.1 + width * index as f64;
                let corners = [(left, 0.0), (left + width * 0.9, bar.value.unwrap_or(0.0))];
                chart.draw_series([Rectangle::new(corners, pick(bar.color).filled())]).map_err(failed)?;
            }
            let name = EmptyElement::at((place + 0.5, 0.0)) + Text::new((*task).to_owned(), (0, 8), label.clone());
            chart.draw_series([name]).map_err(failed)?;
        }
        Ok(())
    })
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn chart<'a, 'b>(root: &'a Area<'b>) -> anyhow::Result<ChartBuilder<'a, 'b, SVGBackend<'b>>> {
    let mut builder = ChartBuilder::on(root);
    builder.margin(12).x_label_area_size(44).y_label_area_size(64);
    Ok(builder)
}

/// An SVG element without a fixed size or background.
fn draw(paint: impl FnOnce(Area<'_>) -> anyhow::Result<()>) -> anyhow::Result<String> {
    let mut svg = String::new();
    let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
    paint(root)?;
    let fixed = format!("width=\"{}\" height=\"{}\" viewBox", SIZE.0, SIZE.1);
    Ok(svg.replacen(&fixed, "viewBox", 1).replace(INK, "currentColor"))
}

fn failed(error: impl Display) -> anyhow::Error {
    anyhow::anyhow!("draw a plot: {error}")
}
